// Sums in an order that does not depend on the number of threads: what every rank computes for
// itself must come to the same bits on all, whatever cores each has.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

namespace birkhoff {

// Sums are taken over blocks of this many elements, which are then added in order: 16 KiB of fp32
// stay in the L1 cache.
inline constexpr std::int64_t kSumBlock = 4096;
inline std::int64_t num_sum_blocks(std::int64_t n) { return (n + kSumBlock - 1) / kSumBlock; }

// Sum of x[i]^2 over one block of n <= kSumBlock elements, in fp64. Local.
template <typename T>
double block_sum_of_squares(const T* x, std::int64_t n) {
  constexpr std::int64_t kLanes = 16;  // independent sums, so that the compiler may use vectors
  std::array<double, kLanes> lanes{};
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      const double value = static_cast<double>(x[i + lane]);
      lanes[lane] += value * value;
    }
  }
  for (; i < n; ++i) {
    const double value = static_cast<double>(x[i]);
    lanes[0] += value * value;
  }
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

// Sum of x[i]^2 over n elements: those of its blocks, in order. Local.
template <typename T>
double sum_of_squares(const T* x, std::int64_t n) {
  std::vector<double> block_sums(static_cast<std::size_t>(num_sum_blocks(n)));
  at::parallel_for(0, num_sum_blocks(n), 8, [&](std::int64_t first_block, std::int64_t last_block) {
    for (std::int64_t block = first_block; block < last_block; ++block) {
      const std::int64_t begin = block * kSumBlock;
      block_sums[block] = block_sum_of_squares(x + begin, std::min(kSumBlock, n - begin));
    }
  });
  double sum = 0;
  for (const double block_sum : block_sums) sum += block_sum;
  return sum;
}

}  // namespace birkhoff
