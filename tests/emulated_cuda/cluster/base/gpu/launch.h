// A processor that runs the source of a kernel as a GPU would: blocks one after another, the
// threads of a block as fibers that change places at barriers and shuffles, in random order. For
// tests of what a kernel computes, on machines without a GPU; it shows some races, but no speed. A
// test includes the .cu itself, with this folder ahead of the real launch.h in the search path, and
// defines the array of dynamic shared memory that the .cu declares. What a kernel needs beyond this
// is added here.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
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
struct alignas(16) float4 {
  float x, y, z, w;
};

namespace birkhoff::emulated {

inline constexpr int kWarp = 32;
inline constexpr std::size_t kStackBytes = 1 << 16;

// Those who wait until all are there. A thread that has returned is waited for no more.
struct Barrier {
  unsigned expected = 0, arrived = 0, phase = 0;
};

struct Thread {
  test::Fiber fiber{kStackBytes};
  const Barrier* barrier = nullptr;  // where it waits for the end of `phase`
  unsigned phase = 0;

  bool waits() const { return barrier != nullptr && barrier->phase == phase; }
};

struct Machine {
  std::vector<std::unique_ptr<Thread>> threads;
  std::vector<Barrier> warps;
  std::vector<std::uint64_t> lanes;  // what shuffles exchange
  Barrier block_barrier;
  std::function<void()> body;
  unsigned thread = 0, block = 0, block_size = 0;
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

inline void release_if_complete(Barrier& barrier) {
  if (barrier.arrived < barrier.expected) return;
  barrier.arrived = 0;
  ++barrier.phase;
}

inline void wait(Barrier& barrier) {
  Thread& thread = *machine.threads[machine.thread];
  thread.barrier = &barrier;
  thread.phase = barrier.phase;
  ++barrier.arrived;
  release_if_complete(barrier);
  while (thread.waits()) thread.fiber.yield();
}

inline void run_thread() {
  machine.body();
  for (Barrier* barrier : {&machine.warps[machine.thread / kWarp], &machine.block_barrier}) {
    --barrier->expected;
    if (barrier->expected > 0) release_if_complete(*barrier);
  }
}

inline void run_block() {
  const unsigned size = machine.block_size;
  machine.warps.assign((size + kWarp - 1) / kWarp, {});
  machine.lanes.assign(size, 0);
  machine.block_barrier = {.expected = size};
  while (machine.threads.size() < size) machine.threads.push_back(std::make_unique<Thread>());
  for (unsigned t = 0; t < size; ++t) {
    ++machine.warps[t / kWarp].expected;
    machine.threads[t]->barrier = nullptr;
    machine.threads[t]->fiber.start(run_thread);
  }
  std::vector<unsigned> order(size);
  std::iota(order.begin(), order.end(), 0u);
  for (bool running = true; running;) {
    running = false;
    std::shuffle(order.begin(), order.end(), machine.draw);
    for (const unsigned t : order) {
      Thread& thread = *machine.threads[t];
      if (thread.fiber.done()) continue;
      running = true;
      if (thread.waits()) continue;
      machine.thread = t;
      thread.fiber.resume();
    }
  }
}

struct Index {
  unsigned x;
};
inline Index thread_index() { return {machine.thread}; }
inline Index block_index() { return {machine.block}; }

// The value of lane (mine ^ distance).
template <typename T>
T exchange(T value, int distance) {
  static_assert(sizeof(T) <= sizeof(std::uint64_t));
  const unsigned thread = machine.thread;
  Barrier& warp = machine.warps[thread / kWarp];
  std::memcpy(&machine.lanes[thread], &value, sizeof(T));
  wait(warp);
  std::memcpy(&value, &machine.lanes[thread ^ static_cast<unsigned>(distance)], sizeof(T));
  wait(warp);
  return value;
}

// Calls use(lane, value) with the value of each lane of the warp.
template <typename T, typename Use>
void read_lanes(T value, Use use) {
  static_assert(sizeof(T) <= sizeof(std::uint64_t));
  const unsigned thread = machine.thread, first = thread / kWarp * kWarp;
  Barrier& warp = machine.warps[thread / kWarp];
  std::memcpy(&machine.lanes[thread], &value, sizeof(T));
  wait(warp);
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    std::memcpy(&value, &machine.lanes[first + lane], sizeof(T));
    use(lane, value);
  }
  wait(warp);
}

}  // namespace birkhoff::emulated

#define threadIdx (birkhoff::emulated::thread_index())
#define blockIdx (birkhoff::emulated::block_index())
#define __syncthreads() birkhoff::emulated::wait(birkhoff::emulated::machine.block_barrier)

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
template <typename T>
T __shfl_xor_sync(unsigned, T value, int distance) {
  return birkhoff::emulated::exchange(value, distance);
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
inline void __syncwarp() {
  using birkhoff::emulated::machine;
  birkhoff::emulated::wait(machine.warps[machine.thread / birkhoff::emulated::kWarp]);
}
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
  machine.block_size = static_cast<unsigned>(shape.threads);
  machine.body = [&] { kernel(arguments...); };
  for (unsigned b = 0; b < shape.blocks; ++b) {
    machine.block = b;
    emulated::run_block();
  }
}

}  // namespace birkhoff
