#include "runtime/gradients/chunk_sums.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "cluster/base/error.h"
#include "cluster/base/gpu/device.h"
#include "runtime/gradients/fixed_order.h"
#include "runtime/gradients/gpu_chunk_sums_params.h"

namespace birkhoff {

static_assert(ChunkSumsParams::kChunk == kSumChunk);

namespace {

// Launches of at most kMaxTensors tensors each.
void sum_on_gpu(const std::vector<at::Tensor>& tensors, double* sums) {
  ChunkSumsParams params{};
  params.dtype = kernel_dtype(tensors[0]);
  params.sums = sums;
  std::int64_t end = 0;
  const auto flush = [&] {
    if constexpr (kHasGpuKernels) launch_chunk_sums(params, current_stream(tensors[0]));
    params.num_tensors = 0;
    params.sums += end;
    end = 0;
  };
  for (const at::Tensor& x_n : tensors) {
    if (x_n.numel() == 0) continue;
    end += num_sum_chunks(x_n.numel());
    params.tensors[params.num_tensors++] = {x_n.const_data_ptr(), x_n.numel(), end};
    if (params.num_tensors == ChunkSumsParams::kMaxTensors) flush();
  }
  flush();
}

void sum_on_cpu(const at::Tensor& x_n, double* sums) {
  const std::int64_t n = x_n.numel();
  AT_DISPATCH_FLOATING_TYPES_AND(at::kBFloat16, x_n.scalar_type(), "chunk_sums_of_squares", [&] {
    const scalar_t* x = x_n.const_data_ptr<scalar_t>();
    at::parallel_for(0, num_sum_chunks(n), 8, [&](std::int64_t first, std::int64_t last) {
      for (std::int64_t chunk = first; chunk < last; ++chunk) {
        const std::int64_t begin = chunk * kSumChunk;
        sums[chunk] = chunk_sum_of_squares(x + begin, std::min(kSumChunk, n - begin));
      }
    });
  });
}

}  // namespace

at::Tensor chunk_sums_of_squares(const std::vector<at::Tensor>& tensors) {
  const at::Tensor& first = tensors.at(0);
  std::int64_t num_chunks = 0;
  for (const at::Tensor& x_n : tensors) {
    require(x_n.is_contiguous() && x_n.scalar_type() == first.scalar_type() &&
                x_n.device() == first.device(),
            "chunk_sums_of_squares: tensors must be contiguous, of one dtype and device");
    num_chunks += num_sum_chunks(x_n.numel());
  }
  const at::Tensor sums = at::empty({num_chunks}, first.options().dtype(at::kDouble));
  if (first.is_meta()) return sums;  // a plan only counts bytes
  double* sum = sums.mutable_data_ptr<double>();
  if (kHasGpuKernels && first.is_cuda()) {
    require(first.scalar_type() == at::kFloat || first.scalar_type() == at::kBFloat16,
            "chunk_sums_of_squares: on a GPU x must be fp32 or bf16");
    sum_on_gpu(tensors, sum);
    return sums;
  }
  for (const at::Tensor& x_n : tensors) {
    sum_on_cpu(x_n, sum);
    sum += num_sum_chunks(x_n.numel());
  }
  return sums;
}

}  // namespace birkhoff
