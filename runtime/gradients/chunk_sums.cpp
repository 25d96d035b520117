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

at::Tensor chunk_sums_of_squares(const at::Tensor& x_n) {
  require(x_n.is_contiguous(), "chunk_sums_of_squares: x must be contiguous");
  const std::int64_t n = x_n.numel(), num_blocks = num_sum_chunks(n);
  const at::Tensor sums = at::empty({num_blocks}, x_n.options().dtype(at::kDouble));
  if (x_n.is_meta()) return sums;  // a plan only counts bytes
  if (kHasGpuKernels && x_n.is_cuda()) {
    require(x_n.scalar_type() == at::kFloat || x_n.scalar_type() == at::kBFloat16,
            "chunk_sums_of_squares: on a GPU x must be fp32 or bf16");
    if constexpr (kHasGpuKernels) {
      launch_chunk_sums({.x = x_n.const_data_ptr(),
                         .dtype = kernel_dtype(x_n),
                         .elements = n,
                         .sums = sums.mutable_data_ptr<double>()},
                        current_stream(x_n));
    }
    return sums;
  }
  double* sum = sums.mutable_data_ptr<double>();
  AT_DISPATCH_FLOATING_TYPES_AND(at::kBFloat16, x_n.scalar_type(), "chunk_sums_of_squares", [&] {
    const scalar_t* x = x_n.const_data_ptr<scalar_t>();
    at::parallel_for(0, num_blocks, 8, [&](std::int64_t first, std::int64_t last) {
      for (std::int64_t chunk = first; chunk < last; ++chunk) {
        const std::int64_t begin = chunk * kSumChunk;
        sum[chunk] = chunk_sum_of_squares(x + begin, std::min(kSumChunk, n - begin));
      }
    });
  });
  return sums;
}

}  // namespace birkhoff
