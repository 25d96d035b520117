// The operations of GpuThread (cluster/base/gpu/gpu_thread.cuh) that emulated kernels use, bf16
// only.
#pragma once

#include <cuda_bf16.h>

#include <bit>
#include <cmath>
#include <cstdint>

#include "cluster/base/gpu/launch.h"

namespace birkhoff {

template <typename T>
class GpuThread {
 public:
  // mma.m16n8k16, with the sums of the least exact tensor cores: the 16 products and c are
  // truncated to 24 bits of the largest of them, and so is their sum.
  void multiply(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                std::uint32_t b1) const {
    const unsigned thread = emulated::machine.fibers.thread(),
                   first = thread / emulated::kWarp * emulated::kWarp;
    const unsigned lane = thread - first;
    // A lane is at most one operation ahead of the others, so two sets of operands suffice.
    Operands* lanes = operands[num_products[thread]++ % 2] + first;
    lanes[lane] = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
    emulated::wait_for_warp();
    for (unsigned i = 0; i < 4; ++i) {
      const unsigned row = lane / 4, half = i / 2, column = lane % 4 * 2 + i % 2;
      double addends[17] = {c[i]};
      for (unsigned k = 0; k < 16; ++k) {
        const std::uint32_t x = lanes[row * 4 + k % 8 / 2].a[half + k / 8 * 2];
        const std::uint32_t y = lanes[column * 4 + k % 8 / 2].b[k / 8];
        addends[k + 1] = static_cast<double>(half_of(x, k % 2)) * half_of(y, k % 2);
      }
      c[i] = truncated_sum(addends);
    }
  }

  std::uint32_t pack(float low, float high) const {
    return std::uint32_t{T(low).x} | std::uint32_t{T(high).x} << 16;
  }
  float unpack(std::uint16_t word) const { return T(word, T::from_bits()); }

 private:
  struct Operands {
    std::uint32_t a[4], b[2];
  };
  static constexpr unsigned kMaxThreads = 1024;
  inline static Operands operands[2][kMaxThreads];
  inline static unsigned num_products[kMaxThreads];

  static float half_of(std::uint32_t word, unsigned half) {
    return T(static_cast<std::uint16_t>(word >> 16 * half), T::from_bits());
  }

  static float truncated_sum(const double (&addends)[17]) {
    double most = 0, sum = 0;
    for (const double x : addends) most = std::fmax(most, std::fabs(x));
    if (!(most > 0) || !std::isfinite(most)) {
      for (const double x : addends) sum += x;
      return static_cast<float>(sum);
    }
    const double scale = std::ldexp(1.0, 23 - std::ilogb(most));
    for (const double x : addends) sum += std::trunc(x * scale) / scale;
    constexpr std::uint64_t kBeyond24Bits = (1u << 29) - 1;
    return static_cast<float>(
        std::bit_cast<double>(std::bit_cast<std::uint64_t>(sum) & ~kBeyond24Bits));
  }
};

}  // namespace birkhoff
