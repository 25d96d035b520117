// Sums in an order that does not depend on the number of threads: what every rank computes for
// itself must come to the same bits on all, whatever cores each has.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

namespace birkhoff {

// Sum of x[i]^2 over n elements, accumulated in fp64 over blocks of fixed size that are added in
// order. Local.
template <typename T>
double sum_of_squares(const T* x, std::int64_t n) {
  constexpr std::int64_t kBlock = 4096;  // elements: 16 KiB of fp32 stay in the L1 cache
  constexpr std::int64_t kLanes = 16;    // independent sums, so that the compiler may use vectors
  std::vector<double> block_sums(static_cast<std::size_t>((n + kBlock - 1) / kBlock));
  at::parallel_for(0, static_cast<std::int64_t>(block_sums.size()), 8,
                   [&](std::int64_t begin, std::int64_t end) {
                     for (std::int64_t block = begin; block < end; ++block) {
                       const T* first = x + block * kBlock;
                       const std::int64_t size = std::min(kBlock, n - block * kBlock);
                       std::array<double, kLanes> lanes{};
                       std::int64_t i = 0;
                       for (; i + kLanes <= size; i += kLanes) {
                         for (std::int64_t lane = 0; lane < kLanes; ++lane) {
                           const double value = static_cast<double>(first[i + lane]);
                           lanes[lane] += value * value;
                         }
                       }
                       for (; i < size; ++i) {
                         const double value = static_cast<double>(first[i]);
                         lanes[0] += value * value;
                       }
                       double sum = 0;
                       for (const double lane : lanes) sum += lane;
                       block_sums[block] = sum;
                     }
                   });
  double sum = 0;
  for (const double block_sum : block_sums) sum += block_sum;
  return sum;
}

}  // namespace birkhoff
