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

// 16 bytes, moved by one instruction: eight 16-bit elements.
struct alignas(16) Words {
  std::uint32_t words[4];
};

}  // namespace birkhoff
