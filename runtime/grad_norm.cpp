#include "runtime/grad_norm.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

namespace birkhoff {
namespace {

constexpr std::int64_t kBlock = 4096;  // elements: 16 KiB of fp32 stay in the L1 cache
constexpr std::int64_t kLanes = 16;    // independent sums, so that the compiler may use vectors

template <typename T>
double sum_of_squares(const T* x, std::int64_t n) {
  std::array<double, kLanes> lanes{};
  // Buckets are multiples of GradBuckets::kAlignment long, hence of kLanes.
  for (std::int64_t i = 0; i < n; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      const double value = static_cast<double>(x[i + lane]);
      lanes[lane] += value * value;
    }
  }
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}
static_assert(GradBuckets::kAlignment % kLanes == 0);

}  // namespace

double gradient_norm(const GradBuckets& buckets) {
  double sum = 0;
  std::vector<double> block_sums;
  for (const auto& bucket : buckets.buckets()) {
    const std::int64_t n = bucket.elements();
    block_sums.resize((n + kBlock - 1) / kBlock);
    AT_DISPATCH_FLOATING_TYPES(bucket.gradients.scalar_type(), "gradient_norm", [&] {
      const scalar_t* x = bucket.gradients.const_data_ptr<scalar_t>();
      at::parallel_for(0, static_cast<std::int64_t>(block_sums.size()), 8,
                       [&](std::int64_t begin, std::int64_t end) {
                         for (std::int64_t block = begin; block < end; ++block) {
                           const std::int64_t first = block * kBlock;
                           block_sums[block] =
                               sum_of_squares(x + first, std::min(kBlock, n - first));
                         }
                       });
    });
    for (const double block_sum : block_sums) sum += block_sum;
  }
  return std::sqrt(sum);
}

}  // namespace birkhoff
