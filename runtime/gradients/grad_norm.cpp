#include "runtime/gradients/grad_norm.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "runtime/gradients/chunk_sums.h"
#include "runtime/gradients/fixed_order.h"

namespace birkhoff {
namespace {

// The sums of the same blocks where each rank holds one slice: a block is summed by the rank in
// whose slice it begins, the others leave a zero. Its last elements may lie in the slices behind,
// so ranks first exchange the heads of their slices, as much of each as a block may need.
std::vector<at::Tensor> block_sums_of_slices(const GradBuckets& buckets) {
  Group& group = buckets.group();
  const auto head_length = [](Interval slice) { return std::min(slice.size(), kSumBlock); };
  std::vector<at::Tensor> heads;
  for (const auto& bucket : buckets.buckets()) {
    const Interval slice = buckets.held(bucket);
    heads.push_back(bucket.gradients.narrow(0, slice.begin, head_length(slice)));
  }
  const at::Tensor my_heads = at::cat(heads);
  const at::Tensor all_heads = at::empty({group.size() * my_heads.numel()}, my_heads.options());
  group.all_gather(all_heads, my_heads, "heads of gradient slices");

  std::vector<at::Tensor> sums;
  std::int64_t head = 0;  // place of the bucket's heads among those of a rank
  for (const auto& bucket : buckets.buckets()) {
    const Interval slice = buckets.held(bucket);
    const std::int64_t length = bucket.elements();
    const auto end_of = [&](std::int64_t block) {
      return std::min((block + 1) * kSumBlock, length);
    };
    sums.push_back(
        at::zeros({num_sum_blocks(length)}, bucket.gradients.options().dtype(at::kDouble)));
    const auto set = [&](std::int64_t block, const at::Tensor& elements) {
      const at::Tensor values = block_sums_of_squares(elements);
      sums.back().narrow(0, block, values.numel()).copy_(values);
    };
    const std::int64_t first = num_sum_blocks(slice.begin), last = num_sum_blocks(slice.end);
    const bool ends_behind = first < last && end_of(last - 1) > slice.end;
    const std::int64_t last_inside = ends_behind ? last - 1 : last;
    if (first < last_inside) {
      const std::int64_t begin = first * kSumBlock;
      set(first, bucket.gradients.narrow(0, begin, end_of(last_inside - 1) - begin));
    }
    if (ends_behind) {
      const std::int64_t begin = (last - 1) * kSumBlock, end = end_of(last - 1);
      std::vector<at::Tensor> parts{bucket.gradients.narrow(0, begin, slice.end - begin)};
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

at::Tensor gradient_block_sums(const GradBuckets& buckets) {
  if (buckets.buckets().empty()) return at::zeros({0}, at::kDouble);
  std::vector<at::Tensor> of_buckets;
  if (buckets.sliced()) {
    of_buckets = block_sums_of_slices(buckets);
  } else {
    for (const auto& bucket : buckets.buckets()) {
      of_buckets.push_back(block_sums_of_squares(bucket.gradients));
    }
  }
  const at::Tensor block_sums = at::cat(of_buckets);
  // One rank has summed each block, so adding zeros over the ranks is exact.
  if (buckets.sliced()) buckets.group().all_reduce(block_sums, ReduceOp::kSum, "gradient norm");
  return block_sums;
}

double norm_of_block_sums(const GradBuckets& buckets, const at::Tensor& block_sums) {
  const at::Tensor on_host = block_sums.cpu();
  const double* block_sum = on_host.const_data_ptr<double>();
  double sum = 0;
  for (const auto& bucket : buckets.buckets()) {
    double bucket_sum = 0;
    for (std::int64_t block = 0; block < num_sum_blocks(bucket.elements()); ++block) {
      bucket_sum += *block_sum++;
    }
    sum += bucket_sum;
  }
  return std::sqrt(sum);
}

double gradient_norm(const GradBuckets& buckets) {
  return norm_of_block_sums(buckets, gradient_block_sums(buckets));
}

}  // namespace birkhoff
