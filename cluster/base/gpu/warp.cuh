// Warps: threads whose lanes exchange values without shared memory. For .cu files.
#pragma once

#include "cluster/base/gpu/launch.h"

namespace birkhoff {

constexpr int kWarp = 32;
constexpr unsigned kWholeWarp = 0xffffffff;

// The thread's warp in its block, and its lane in the warp.
__device__ inline int warp_number() { return static_cast<int>(threadIdx.x) / kWarp; }
__device__ inline int lane_number() { return static_cast<int>(threadIdx.x) % kWarp; }

// The sum of x over each kLanes neighboring lanes; all of them get it. All lanes of the warp call
// it.
template <int kLanes>
__device__ inline float lane_sum(float x) {
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) {
    x += __shfl_xor_sync(kWholeWarp, x, distance);
  }
  return x;
}

}  // namespace birkhoff
