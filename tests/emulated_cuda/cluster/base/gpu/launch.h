// A processor that runs the source of a kernel as a GPU would: blocks one after another, the
// threads of a block as fibers that change places at barriers and shuffles, in random order. For
// tests of what a kernel computes, on machines without a GPU; it shows some races, but no speed. A
// test includes the .cu itself, with this folder ahead of the real launch.h in the search path, and
// defines the array of dynamic shared memory that the .cu declares. What a kernel needs beyond this
// is added here. Kernels on tensor cores, whose thread is a template parameter, run on
// tests/cluster/base/emulated_gpu.h, which checks their shared memory.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "tests/cluster/base/fiber.h"

#define __global__
#define __device__
#define __host__
#define __shared__
#define __launch_bounds__(...)

struct CUstream_st;
using cudaStream_t = CUstream_st*;
enum cudaError_t { cudaSuccess, cudaErrorInvalidValue };
struct alignas(8) float2 {
  float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
struct alignas(16) float4 {
  float x, y, z, w;
};

namespace birkhoff::emulated {

inline constexpr unsigned kWarp = test::FiberBlock::kWarp;

struct Machine {
  test::FiberBlock fibers;           // of the block that runs
  std::vector<std::uint64_t> lanes;  // what shuffles exchange
  unsigned block = 0, num_blocks = 0;
  std::mt19937 draw;          // which thread comes next
  int shared_limit = 232448;  // of sm_90
};
inline Machine machine;

// The device has this much shared memory for as long as the object exists.
class SharedLimit {
 public:
  explicit SharedLimit(int bytes) : before_(machine.shared_limit) { machine.shared_limit = bytes; }
  ~SharedLimit() { machine.shared_limit = before_; }
  SharedLimit(const SharedLimit&) = delete;
  SharedLimit& operator=(const SharedLimit&) = delete;

 private:
  int before_;
};

inline void wait_for_warp() { machine.fibers.wait(machine.fibers.of_warp()); }
inline void wait_for_block() { machine.fibers.wait(machine.fibers.of_block()); }

struct Index {
  unsigned x;
};
inline Index thread_index() { return {machine.fibers.thread()}; }
inline Index block_index() { return {machine.block}; }
inline Index grid_size() { return {machine.num_blocks}; }
inline Index block_size() { return {static_cast<unsigned>(machine.lanes.size())}; }

// The value of lane (mine ^ distance).
template <typename T>
T exchange(T value, int distance) {
  static_assert(sizeof(T) <= sizeof(std::uint64_t));
  const unsigned thread = machine.fibers.thread();
  std::memcpy(&machine.lanes[thread], &value, sizeof(T));
  wait_for_warp();
  std::memcpy(&value, &machine.lanes[thread ^ static_cast<unsigned>(distance)], sizeof(T));
  wait_for_warp();
  return value;
}

// Calls use(lane, value) with the value of each lane of the warp.
template <typename T, typename Use>
void read_lanes(T value, Use use) {
  static_assert(sizeof(T) <= sizeof(std::uint64_t));
  const unsigned thread = machine.fibers.thread(), first = thread / kWarp * kWarp;
  std::memcpy(&machine.lanes[thread], &value, sizeof(T));
  wait_for_warp();
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    std::memcpy(&value, &machine.lanes[first + lane], sizeof(T));
    use(lane, value);
  }
  wait_for_warp();
}

}  // namespace birkhoff::emulated

#define threadIdx (birkhoff::emulated::thread_index())
#define blockIdx (birkhoff::emulated::block_index())
#define gridDim (birkhoff::emulated::grid_size())
#define blockDim (birkhoff::emulated::block_size())
#define __syncthreads() birkhoff::emulated::wait_for_block()

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
template <typename T>
T __shfl_xor_sync(unsigned, T value, int distance) {
  return birkhoff::emulated::exchange(value, distance);
}
template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  T result{};
  birkhoff::emulated::read_lanes(value, [&](unsigned from, T other) {
    if (static_cast<int>(from) == lane) result = other;
  });
  return result;
}
inline unsigned __ballot_sync(unsigned, bool predicate) {
  unsigned lanes = 0;
  birkhoff::emulated::read_lanes(
      predicate, [&](unsigned lane, bool value) { lanes |= (value ? 1u : 0u) << lane; });
  return lanes;
}
inline int __reduce_add_sync(unsigned, int value) {
  int sum = 0;
  birkhoff::emulated::read_lanes(value, [&](unsigned, int other) { sum += other; });
  return sum;
}
inline unsigned __match_any_sync(unsigned, int value) {
  unsigned lanes = 0;
  birkhoff::emulated::read_lanes(
      value, [&](unsigned lane, int other) { lanes |= (other == value ? 1u : 0u) << lane; });
  return lanes;
}
inline void __syncwarp() { birkhoff::emulated::wait_for_warp(); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }
inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}
using std::max;
using std::min;

namespace birkhoff {

inline void cuda_check(cudaError_t status, const char*) {
  if (status != cudaSuccess) std::abort();
}

inline std::size_t most_shared_bytes() {
  return static_cast<std::size_t>(emulated::machine.shared_limit);
}

struct LaunchShape {
  std::int64_t blocks;
  int threads;
  cudaStream_t stream;
  std::size_t shared_bytes = 0;
};

template <typename... Parameters, typename... Arguments>
void launch(const LaunchShape& shape, void (*kernel)(Parameters...), Arguments&&... arguments) {
  emulated::Machine& machine = emulated::machine;
  if (shape.blocks < 0 || shape.threads <= 0 || shape.threads > 1024) std::abort();
  if (shape.shared_bytes > most_shared_bytes()) std::abort();
  const auto threads = static_cast<unsigned>(shape.threads);
  machine.lanes.assign(threads, 0);
  machine.num_blocks = static_cast<unsigned>(shape.blocks);
  for (machine.block = 0; machine.block < shape.blocks; ++machine.block) {
    machine.fibers.run(
        threads, /*leave=*/true,
        [&](auto& order) { std::shuffle(order.begin(), order.end(), machine.draw); },
        [&] { kernel(arguments...); });
  }
}

}  // namespace birkhoff
