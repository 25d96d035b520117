#include "runtime/gradients/grad_norm.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <vector>

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

// The same chunk sums if each rank holds one slice. The rank in whose slice a chunk begins sums it;
// all other ranks leave a zero. The chunk's last elements may lie in later slices, so ranks first
// exchange the heads of their slices, as far as a chunk may need them.
std::vector<at::Tensor> chunk_sums_of_slices(const GradBuckets& buckets) {
  ProcessGroup& group = buckets.slice_group();
  const auto head_length = [](Interval slice) { return std::min(slice.size(), kSumChunk); };
  std::vector<at::Tensor> heads;
  for (const auto& bucket : buckets.buckets()) {
    heads.push_back(bucket.own_gradients.narrow(0, 0, head_length(bucket.owned)));
  }
  const at::Tensor my_heads = at::cat(heads);
  const at::Tensor all_heads = at::empty({group.size() * my_heads.numel()}, my_heads.options());
  group.all_gather(all_heads, my_heads, "heads of gradient slices");

  std::vector<at::Tensor> sums;
  std::int64_t head = 0;  // offset of the bucket's head among a rank's heads
  for (const auto& bucket : buckets.buckets()) {
    const Interval slice = bucket.owned;
    const std::int64_t length = bucket.elements();
    const auto end_of = [&](std::int64_t chunk) {
      return std::min((chunk + 1) * kSumChunk, length);
    };
    sums.push_back(
        at::zeros({num_sum_chunks(length)}, bucket.own_gradients.options().dtype(at::kDouble)));
    const auto set = [&](std::int64_t chunk, const at::Tensor& elements) {
      const at::Tensor values = chunk_sums_of_squares({elements});
      sums.back().narrow(0, chunk, values.numel()).copy_(values);
    };
    const std::int64_t first = num_sum_chunks(slice.begin), last = num_sum_chunks(slice.end);
    const bool ends_behind = first < last && end_of(last - 1) > slice.end;
    const std::int64_t last_inside = ends_behind ? last - 1 : last;
    if (first < last_inside) {
      const std::int64_t begin = first * kSumChunk;
      set(first,
          bucket.own_gradients.narrow(0, begin - slice.begin, end_of(last_inside - 1) - begin));
    }
    if (ends_behind) {
      const std::int64_t begin = (last - 1) * kSumChunk, end = end_of(last - 1);
      std::vector<at::Tensor> parts{
          bucket.own_gradients.narrow(0, begin - slice.begin, slice.end - begin)};
      for (int rank = group.rank() + 1; rank * slice.size() < end; ++rank) {
        parts.push_back(all_heads.narrow(0, rank * my_heads.numel() + head,
                                         std::min(slice.size(), end - rank * slice.size())));
      }
      set(last - 1, at::cat(parts));
    }
    head += head_length(slice);
  }
  return sums;
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
    const std::int64_t n = x_n.numel();
    AT_DISPATCH_FLOATING_TYPES_AND(at::kBFloat16, x_n.scalar_type(), "chunk_sums_of_squares", [&] {
      chunk_sums_of_squares(x_n.const_data_ptr<scalar_t>(), n, sum);
    });
    sum += num_sum_chunks(n);
  }
  return sums;
}

at::Tensor gradient_chunk_sums(const GradBuckets& buckets) {
  if (buckets.buckets().empty()) return at::zeros({0}, at::kDouble);
  if (!buckets.sliced()) {
    std::vector<at::Tensor> gradients;
    for (const auto& bucket : buckets.buckets()) gradients.push_back(bucket.gradients);
    return chunk_sums_of_squares(gradients);
  }
  const at::Tensor chunk_sums = at::cat(chunk_sums_of_slices(buckets));
  // One rank summed each chunk, so adding zeros over the ranks is exact.
  buckets.slice_group().all_reduce(chunk_sums, ReduceOp::kSum, kGradientNorm);
  return chunk_sums;
}

double norm_of_chunk_sums(const GradBuckets& buckets, const at::Tensor& chunk_sums) {
  const at::Tensor on_host = chunk_sums.cpu();
  const double* chunk_sum = on_host.const_data_ptr<double>();
  double of_divided = 0, of_whole = 0;
  for (const auto& bucket : buckets.buckets()) {
    double bucket_sum = 0;
    for (std::int64_t chunk = 0; chunk < num_sum_chunks(bucket.elements()); ++chunk) {
      bucket_sum += *chunk_sum++;
    }
    (bucket.divided ? of_divided : of_whole) += bucket_sum;
  }
  if (ProcessGroup* const tensor = buckets.place().tensor; tensor != nullptr) {
    const at::Tensor sum =
        at::full({1}, of_divided, at::TensorOptions(at::kDouble).device(tensor->device()));
    tensor->all_reduce(sum, ReduceOp::kSum, kGradientNorm);
    of_divided = sum.item<double>();
  }
  return std::sqrt(of_divided + of_whole);
}

}  // namespace birkhoff
