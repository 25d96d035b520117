// Definitions for kernel sources that g++ compiles too, to emulate them on the CPU. No LibTorch
// here.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define BIRKHOFF_DEVICE __device__ __forceinline__
#define BIRKHOFF_PRAGMA(text) _Pragma(#text)
#define BIRKHOFF_UNROLL BIRKHOFF_PRAGMA(unroll)
#define BIRKHOFF_UNROLL_BY(count) BIRKHOFF_PRAGMA(unroll count)
#else
#define BIRKHOFF_DEVICE inline
#define BIRKHOFF_UNROLL
#define BIRKHOFF_UNROLL_BY(count)
#endif

namespace birkhoff {

// How many bits of x are set, and which is the lowest; x is not 0 then.
BIRKHOFF_DEVICE int num_bits(std::uint32_t x) {
#ifdef __CUDACC__
  return __popc(x);
#else
  return __builtin_popcount(x);
#endif
}
BIRKHOFF_DEVICE int lowest_bit(std::uint32_t x) {
#ifdef __CUDACC__
  return __ffs(static_cast<int>(x)) - 1;
#else
  return __builtin_ctz(x);
#endif
}

// 16 bytes, moved by one instruction: eight 16-bit elements.
struct alignas(16) Words {
  std::uint32_t words[4];
};

}  // namespace birkhoff
