#include "runtime/grad_norm.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>

#include "runtime/fixed_order.h"

namespace birkhoff {
namespace {

template <typename T>
double sum_of_all(const GradBuckets& buckets) {
  double sum = 0;
  for (const auto& bucket : buckets.buckets()) {
    sum += sum_of_squares(bucket.gradients.const_data_ptr<T>(), bucket.elements());
  }
  return sum;
}

// The same blocks added in the same order as in sum_of_all(), where each rank holds one slice: a
// block is summed by the rank in whose slice it begins. Its last elements may lie in the slices
// behind, so ranks first exchange the heads of their slices, as much of each as a block may need.
template <typename T>
double sum_over_slices(const GradBuckets& buckets) {
  Group& group = buckets.group();
  const auto head_length = [](Interval slice) { return std::min(slice.size(), kSumBlock); };
  std::vector<at::Tensor> heads;
  std::int64_t num_blocks = 0;
  for (const auto& bucket : buckets.buckets()) {
    const Interval slice = buckets.held(bucket);
    heads.push_back(bucket.gradients.narrow(0, slice.begin, head_length(slice)));
    num_blocks += num_sum_blocks(bucket.elements());
  }
  const at::Tensor my_heads = at::cat(heads);
  const at::Tensor all_heads = at::empty({group.size() * my_heads.numel()}, my_heads.options());
  group.all_gather(all_heads, my_heads, "heads of gradient slices");

  // One rank sums a block, the others leave a zero, so adding them over the ranks is exact.
  const at::Tensor block_sums = at::zeros({num_blocks}, at::kDouble);
  double* sums = block_sums.mutable_data_ptr<double>();  // of the bucket's blocks
  const T* bucket_heads = all_heads.const_data_ptr<T>();
  for (const auto& bucket : buckets.buckets()) {
    const Interval slice = buckets.held(bucket);
    const T* gradients = bucket.gradients.const_data_ptr<T>();
    const auto end_of = [&](std::int64_t block) {
      return std::min((block + 1) * kSumBlock, bucket.elements());
    };
    const std::int64_t first = num_sum_blocks(slice.begin), last = num_sum_blocks(slice.end);
    at::parallel_for(first, last, 8, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t block = begin; block < end; ++block) {
        const std::int64_t start = block * kSumBlock;
        if (end_of(block) > slice.end) continue;
        sums[block] = block_sum_of_squares(gradients + start, end_of(block) - start);
      }
    });
    if (first < last && end_of(last - 1) > slice.end) {
      const std::int64_t start = (last - 1) * kSumBlock, end = end_of(last - 1);
      std::vector<T> block(gradients + start, gradients + slice.end);
      for (int rank = group.rank() + 1; rank * slice.size() < end; ++rank) {
        const T* head = bucket_heads + rank * my_heads.numel();
        block.insert(block.end(), head, head + std::min(slice.size(), end - rank * slice.size()));
      }
      sums[last - 1] = block_sum_of_squares(block.data(), end - start);
    }
    sums += num_sum_blocks(bucket.elements());
    bucket_heads += head_length(slice);
  }
  group.all_reduce(block_sums, ReduceOp::kSum, "gradient norm");

  double sum = 0;
  sums = block_sums.mutable_data_ptr<double>();
  for (const auto& bucket : buckets.buckets()) {
    double bucket_sum = 0;
    for (std::int64_t block = 0; block < num_sum_blocks(bucket.elements()); ++block) {
      bucket_sum += *sums++;
    }
    sum += bucket_sum;
  }
  return sum;
}

}  // namespace

double gradient_norm(const GradBuckets& buckets) {
  if (buckets.buckets().empty()) return 0;
  double sum = 0;
  AT_DISPATCH_FLOATING_TYPES(
      buckets.buckets().front().gradients.scalar_type(), "gradient_norm", [&] {
        sum = buckets.sliced() ? sum_over_slices<scalar_t>(buckets) : sum_of_all<scalar_t>(buckets);
      });
  return std::sqrt(sum);
}

}  // namespace birkhoff
