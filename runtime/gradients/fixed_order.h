// Sums in an order that does not depend on the number of threads: a value that every rank computes
// for itself must have the same bits on all ranks, whatever their numbers of cores.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

namespace birkhoff {

// Each chunk of this many elements is summed by itself, then the chunk sums are added in order: 16
// KiB of fp32 stay in the L1 cache.
inline constexpr std::int64_t kSumChunk = 4096;
inline std::int64_t num_sum_chunks(std::int64_t n) { return (n + kSumChunk - 1) / kSumChunk; }

// Sum of x[i]^2 over one chunk of n <= kSumChunk elements, in fp64. Local.
template <typename T>
double chunk_sum_of_squares(const T* x, std::int64_t n) {
  constexpr std::int64_t kLanes = 16;  // independent sums, so that the compiler can vectorize
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

// The sum over each chunk of n elements, into sums[num_sum_chunks(n)]. Local.
template <typename T>
void chunk_sums_of_squares(const T* x, std::int64_t n, double* sums) {
  at::parallel_for(0, num_sum_chunks(n), 8, [&](std::int64_t first_chunk, std::int64_t last_chunk) {
    for (std::int64_t chunk = first_chunk; chunk < last_chunk; ++chunk) {
      const std::int64_t begin = chunk * kSumChunk;
      sums[chunk] = chunk_sum_of_squares(x + begin, std::min(kSumChunk, n - begin));
    }
  });
}

// Sum of x[i]^2 over n elements: the sums of its chunks, added in order. Local.
template <typename T>
double sum_of_squares(const T* x, std::int64_t n) {
  std::vector<double> chunk_sums(static_cast<std::size_t>(num_sum_chunks(n)));
  chunk_sums_of_squares(x, n, chunk_sums.data());
  double sum = 0;
  for (const double chunk_sum : chunk_sums) sum += chunk_sum;
  return sum;
}

}  // namespace birkhoff
