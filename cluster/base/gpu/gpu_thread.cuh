// The operations of a GPU thread other than arithmetic: tensor cores, asynchronous copies, shared
// memory, barriers. Kernels that take this class as a template parameter can also run on the CPU,
// with an emulation of it (tests/cluster/base/emulated_gpu.h).
//
// Shared memory is the launch's dynamic shared memory, addressed by its byte offset. T is
// __nv_bfloat16 or __half; a word holds two of them, the first in the lower half.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cluster/base/gpu/kernel_source.h"

namespace birkhoff {

template <typename T>
class GpuThread {
 public:
  // The assumption lets the compiler turn divisions by constants into plain shifts.
  __device__ __forceinline__ int index() const {
    __builtin_assume(threadIdx.x < 1024);
    return static_cast<int>(threadIdx.x);
  }
  __device__ __forceinline__ std::int64_t block() const { return blockIdx.x; }

  // Barriers for the threads of the block and of the warp.
  __device__ __forceinline__ void sync() const { __syncthreads(); }
  __device__ __forceinline__ void sync_warp() const { __syncwarp(); }

  // Copies kBytes (4 or 16) from global to shared memory. If `exists` is false it writes zeros and
  // does not read `from`. The bytes are there after a wait<n>() if at most n groups have been
  // committed after theirs; other threads see them after a barrier that follows the wait.
  template <int kBytes>
  __device__ __forceinline__ void copy_async(std::uint32_t to, const void* from,
                                             bool exists) const {
    const std::uint32_t size = exists ? kBytes : 0;
    if constexpr (kBytes == 16) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address(to)),
                   "l"(__cvta_generic_to_global(from)), "r"(size));
    } else {
      static_assert(kBytes == 4);
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address(to)),
                   "l"(__cvta_generic_to_global(from)), "r"(size));
    }
  }
  // Starts to load the line of global memory around `from` into the L1 cache.
  __device__ __forceinline__ void prefetch(const void* from) const {
    asm volatile("prefetch.global.L1 [%0];" ::"l"(__cvta_generic_to_global(from)));
  }
  __device__ __forceinline__ void commit() const {
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  template <int kGroups>
  __device__ __forceinline__ void wait() const {
    asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
  }

  // ldmatrix: four matrices of 8 x 8, rows of 16 bytes; see
  // attention/kernels/tile_attention/gpu_tiles.h.
  template <bool kTransposed>
  __device__ __forceinline__ void load_matrices(std::uint32_t (&to)[4], std::uint32_t from) const {
    if constexpr (kTransposed) {
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                   : "r"(address(from)));
    } else {
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                   : "r"(address(from)));
    }
  }

  // mma.m16n8k16: c += a b, in fp32.
  __device__ __forceinline__ void multiply(float (&c)[4], const std::uint32_t (&a)[4],
                                           std::uint32_t b0, std::uint32_t b1) const {
    if constexpr (std::is_same_v<T, __half>) {
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
          "{%8, %9}, {%0, %1, %2, %3};"
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, "
          "%7}, {%8, %9}, {%0, %1, %2, %3};"
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
  }

  // pack() rounds two values to nearest, ties to even; unpack() converts one back.
  __device__ __forceinline__ std::uint32_t pack(float low, float high) const {
    if constexpr (std::is_same_v<T, __half>) {
      const __half2 pair = __floats2half2_rn(low, high);
      return *reinterpret_cast<const std::uint32_t*>(&pair);
    } else {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
      return *reinterpret_cast<const std::uint32_t*>(&pair);
    }
  }
  __device__ __forceinline__ float unpack(std::uint16_t word) const {
    if constexpr (std::is_same_v<T, __half>) {
      return __half2float(__ushort_as_half(word));
    } else {
      return __uint_as_float(static_cast<std::uint32_t>(word) << 16);
    }
  }

  // Returns the x (4 bytes) of the lane whose index differs in the bits of `mask`. All lanes of the
  // warp call it.
  template <typename Number>
  __device__ __forceinline__ Number exchange(Number x, int mask) const {
    return __shfl_xor_sync(0xffffffff, x, mask);
  }
  // Whether x holds for any lane of the warp; all of them call it.
  __device__ __forceinline__ bool any(bool x) const { return __any_sync(0xffffffff, x) != 0; }
  // Bit i: whether x holds for lane i of the warp; all of them call it.
  __device__ __forceinline__ std::uint32_t ballot(bool x) const {
    return __ballot_sync(0xffffffff, x);
  }
  // The largest x of the warp's lanes; all of them call it.
  __device__ __forceinline__ int largest(int x) const { return __reduce_max_sync(0xffffffff, x); }

  // 2^x within 2 units in the last place; results below the smallest normal number are 0.
  __device__ __forceinline__ float exp2(float x) const {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  // The logarithm to base 2 of a positive normal number, within 2^-22 times the larger of 1 and its
  // size.
  __device__ __forceinline__ float log2(float x) const {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }

  template <typename Value>
  __device__ __forceinline__ void store_shared(std::uint32_t to, const Value& value) const {
    *reinterpret_cast<Value*>(memory() + to) = value;
  }
  template <typename Value>
  __device__ __forceinline__ Value load_shared(std::uint32_t from) const {
    return *reinterpret_cast<const Value*>(memory() + from);
  }

 private:
  __device__ __forceinline__ static unsigned char* memory() {
    extern __shared__ __align__(128) unsigned char shared[];
    return shared;
  }
  __device__ __forceinline__ static std::uint32_t address(std::uint32_t offset) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(memory())) + offset;
  }
};

}  // namespace birkhoff
