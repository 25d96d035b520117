// The tiles of slots and of rows that the kernels of gpu_gathered.cu read. For that file only.
#pragma once

#include "attention/kernels/gathered_attention/gpu_lists.h"
#include "attention/kernels/gathered_attention/gpu_params.h"
#include "cluster/base/gpu/elements.cuh"
#include "cluster/base/gpu/warp.cuh"

namespace birkhoff {

extern __shared__ float4 gathered_memory[];  // float4 for its alignment

namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kTile = GatheredParams::kTile;
constexpr int kTeam = kThreads / kTile;  // threads that own a slot
constexpr int kPairs = kTile / kTeam;    // of a thread's slot with the slots of the other tile

__device__ inline float team_max(float x) {
#pragma unroll
  for (int distance = 1; distance < kTeam; distance *= 2) {
    x = fmaxf(x, __shfl_xor_sync(kWholeWarp, x, distance));
  }
  return x;
}
__device__ inline bool sees(const GatheredParams& p, const GpuHeadLists& queries, int query,
                            const GpuHeadLists& keys, int key, int segment) {
  const std::int64_t distance =
      queries.p_of(p.by_rank, segment, query) - keys.p_of(p.by_rank, segment, key);
  return distance >= p.least && distance <= p.most &&
         (p.key_lengths == nullptr || keys.row(key) < p.key_lengths[keys.head.b]);
}

// A tile of rows in shared memory, padded by one element per row so that threads that read the same
// column of different rows use different banks.
struct RowTile {
  float* data;
  int pitch;

  __device__ float* row(int i) const { return data + i * pitch; }
  // The rows of slots [first, end), as far as they fit; zeros after them. All threads call it.
  template <typename T>
  __device__ void load(const RowsParams& x, GpuHead head, const GpuHeadLists& lists, int first,
                       int end, int head_dim) const {
    for (int i = warp_number(); i < kTile; i += kWarps) {
      const bool exists = first + i < end;
      const T* from = row_of<const T>(x, head, exists ? lists.row(first + i) : 0);
      for (int d = lane_number(); d < head_dim; d += kWarp) {
        row(i)[d] = exists ? to_float(from[d]) : 0.0f;
      }
    }
  }
};

// The loops of both sums are unrolled only a little: whole, they need more than the 128 registers
// that two blocks of a multiprocessor leave a thread.
__device__ inline float product(const float* a, const float* b, int head_dim) {
  float sum = 0;
#pragma unroll 4
  for (int d = 0; d < head_dim; ++d) sum += a[d] * b[d];
  return sum;
}

// A column of weights [kTile] times a tile of rows.
__device__ inline float weighted_sum(const float* weights, const RowTile& rows, int column) {
  float sum = 0;
#pragma unroll 4
  for (int i = 0; i < kTile; ++i) sum += weights[i] * rows.row(i)[column];
  return sum;
}

inline __host__ __device__ int tiles_of(const GatheredListsParams& lists) {
  return (lists.slots + kTile - 1) / kTile;
}

// The head of `heads` that a block works on, if `blocks` share one, and the block's index among
// these.
struct BlockHead {
  GpuHead head;
  int number;

  __device__ BlockHead(int heads, int blocks) {
    const int of_all = static_cast<int>(blockIdx.x / static_cast<unsigned>(blocks));
    head = {of_all / heads, of_all % heads};
    number = static_cast<int>(blockIdx.x % static_cast<unsigned>(blocks));
  }
};

// The slots of a list that a block owns, kTile of them, and the one that its thread owns.
struct Tile {
  int first, end;    // of the block's slots; none are used if first >= end
  int slot, member;  // of the thread; its number in the slot's team
  int local;         // slot - first

  __device__ Tile(const GpuHeadLists& lists, int number) {
    first = number * kTile;
    end = min(first + kTile, lists.used);
    local = static_cast<int>(threadIdx.x) / kTeam;
    slot = first + local;
    member = static_cast<int>(threadIdx.x) % kTeam;
  }
};

// The segment of the tile's first slot. All lanes of a warp call it.
__device__ inline int first_segment(const GpuHeadLists& lists, const Tile& tile, int segments) {
  return lists.segment_of(tile.first, segments, lane_number(),
                          [](bool x) { return __ballot_sync(kWholeWarp, x); });
}

// The block's shared memory.
struct Memory {
  int pitch;
  __device__ explicit Memory(int head_dim) : pitch(head_dim + 1) {}
  __device__ RowTile rows(int number) const {
    return {reinterpret_cast<float*>(gathered_memory) + number * kTile * pitch, pitch};
  }
  // [kTile, kTile + 1] elements after `row_tiles` tiles of rows.
  __device__ float* products(int row_tiles, int number) const {
    return rows(row_tiles).data + number * kTile * (kTile + 1);
  }
};

}  // namespace
}  // namespace birkhoff
