// Slots grouped by number (counting_sort.h): a counting sort.
//
// A block of 256 threads owns a head. Its first warps own as many successive parts of the slots as
// their counts fit into shared memory: each counts the numbers of its part, the counts are added up
// in the order of numbers and then of warps, and each warp writes its slots behind its
// predecessors'. A warp takes 32 slots at a time; slots of equal number are in the order of
// lanes. No atomics; the result has exactly one valid order. A warp's count of a number also
// tells the ranks of its slots.
#include <algorithm>

#include "attention/kernels/counting_sort/gpu_sort.h"
#include "cluster/base/gpu/launch.h"
#include "cluster/base/gpu/warp.cuh"

namespace birkhoff {

extern __shared__ int group_memory[];

namespace {

constexpr int kGroupThreads = 256, kGroupWarps = kGroupThreads / kWarp;
constexpr std::size_t kMaxBytes = 160 * 1024;  // of sm_80's 163 KiB

// Counts of the numbers 0 to N - 1, and of slots without one.
std::size_t bytes_of_warp(const CountingSortParams& p) {
  return sizeof(int) * (static_cast<std::size_t>(p.count) + 1);
}

__global__ void __launch_bounds__(kGroupThreads)
    groups_kernel(const CountingSortParams p, int warps) {
  const int thread = static_cast<int>(threadIdx.x), warp = warp_number(), lane = lane_number(),
            numbers = p.count + 1;
  const std::int64_t head = blockIdx.x;
  const std::int32_t* const number_of = p.numbers + head * p.slots;
  const int used = p.used == nullptr ? p.slots : p.used[head];
  const auto in_range = [&](int number) {
    return number < 0 || number > p.count ? p.count : number;
  };
  int* const sums = group_memory;            // [kGroupThreads]
  int* const totals = sums + kGroupThreads;  // [kGroupWarps]
  int* const counts = totals + kGroupWarps;  // [warps, N + 1]
  for (int e = thread; e < warps * numbers; e += kGroupThreads) counts[e] = 0;
  __syncthreads();

  // Calls use(slot, number, group) in each lane for the slots of the warp's part, a slot that does
  // not exist included: its number is `numbers`. `group` are the lanes whose slots have the same
  // number. The warp's own count of each number grows after the call.
  int* const own = counts + warp * numbers;
  const auto visit = [&](auto use) {
    if (warp >= warps) return;
    const int runs = (p.slots + kWarp - 1) / kWarp, part = (runs + warps - 1) / warps,
              end = min((warp + 1) * part, runs);
    for (int run = warp * part; run < end; ++run) {
      const int slot = run * kWarp + lane;
      int number = in_range(slot < used ? number_of[slot] : p.count);
      if (slot >= p.slots) number = numbers;
      const unsigned group = __match_any_sync(kWholeWarp, number);
      use(slot, number, group);
      __syncwarp();
      if (number < numbers && lane + 1 == __ffs(static_cast<int>(group))) {
        own[number] += __popc(group);
      }
      __syncwarp();
    }
  };
  visit([](int, int, unsigned) {});
  __syncthreads();

  // Counts become the first slot of each number in each warp. A thread owns successive numbers.
  const int part = (numbers + kGroupThreads - 1) / kGroupThreads,
            first = min(thread * part, numbers), end = min(first + part, numbers);
  int sum = 0;
  for (int n = first; n < end; ++n) {
    for (int w = 0; w < warps; ++w) sum += counts[w * numbers + n];
  }
  sums[thread] = sum;
  const int of_warp = __reduce_add_sync(kWholeWarp, sum);
  if (lane == 0) totals[warp] = of_warp;
  __syncthreads();
  int next = 0;
  for (int w = 0; w < warp; ++w) next += totals[w];
  for (int l = 0; l < lane; ++l) next += sums[warp * kWarp + l];
  for (int n = first; n < end; ++n) {
    p.starts[head * numbers + n] = next;
    for (int w = 0; w < warps; ++w) {
      const int count = counts[w * numbers + n];
      counts[w * numbers + n] = next;
      next += count;
    }
  }
  __syncthreads();

  const unsigned before = (1u << lane) - 1;
  const std::int32_t* const starts = p.starts + head * numbers;
  visit([&](int slot, int number, unsigned group) {
    const std::int64_t at = head * p.slots + slot;
    if (p.others != nullptr) {
      const int other = slot < p.slots ? in_range(p.others[at]) : p.count;
      int rank = own[other] - starts[other] - 1;
      for (int of = 0; of < kWarp; ++of) {
        const int number_there = __shfl_sync(kWholeWarp, number, of);
        if (of <= lane && number_there == other) ++rank;
      }
      if (slot < p.slots) p.other_ranks[at] = rank;
    }
    if (slot >= p.slots) return;
    const int position = own[number] + __popc(group & before);
    p.order[head * p.slots + position] = slot;
    if (p.positions == nullptr) return;
    p.positions[at] = position;
    p.ranks[at] = position - starts[number];
  });
}

}  // namespace

void launch_counting_sort(const CountingSortParams& params, cudaStream_t stream) {
  const std::size_t of_sums = sizeof(int) * (kGroupThreads + kGroupWarps),
                    of_warp = bytes_of_warp(params);
  const int warps =
      static_cast<int>(std::clamp<std::size_t>((kMaxBytes - of_sums) / of_warp, 1, kGroupWarps));
  const std::size_t bytes = of_sums + static_cast<std::size_t>(warps) * of_warp;
  launch(
      {.blocks = params.heads, .threads = kGroupThreads, .stream = stream, .shared_bytes = bytes},
      &groups_kernel, params, warps);
}

}  // namespace birkhoff
