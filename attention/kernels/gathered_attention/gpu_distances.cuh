// Relative positions of keys in the kernels of gpu_gathered.cu (RelativePositions). For that file
// only. Legend: i query, j key, R rows of the table, D head dim.
#pragma once

#include "attention/kernels/gathered_attention/gpu_params.h"
#include "attention/kernels/gathered_attention/gpu_tiles.cuh"

namespace birkhoff {
namespace {

// The index of the table's row for a query and a key.
__device__ inline int distance_of(const RelativeKeysParams& relative, int query_row, int key_row) {
  const std::int64_t distance = std::int64_t{key_row} - query_row - relative.least;
  return static_cast<int>(min(max(distance, std::int64_t{0}), std::int64_t{relative.rows - 1}));
}

// The table of a head of queries, [R, D].
struct HeadTable {
  const GatheredParams& p;
  const float* data;

  __device__ HeadTable(const GatheredParams& params, GpuHead head) : p(params) {
    const std::int64_t first_row =
        p.relative.heads == 1 ? 0 : std::int64_t{head.h} * p.relative.rows;
    data = p.relative.table + first_row * p.head_dim;
  }
  // For a query and a key.
  __device__ const float* row(int query_row, int key_row) const {
    return data + std::int64_t{distance_of(p.relative, query_row, key_row)} * p.head_dim;
  }
};

// The terms of a block from the table for d_q, and for the table's gradient. The sums of ds by
// distance, G_ir, belong to the query's team: member m adds up r = m, m + kTeam, .., each over the
// keys in their order.
struct DistanceSums {
  const GatheredParams& p;
  float* sums;     // G of the tile, [kTile, R]
  float* d_table;  // of the block, [R, D]
  int R, D;

  __device__ DistanceSums(const GatheredParams& params, const BlockHead& block)
      : p(params), R(p.relative.rows), D(p.head_dim) {
    const std::int64_t part =
        (std::int64_t{block.head.b} * p.parts + block.number) * p.heads + block.head.h;
    sums = p.distance_sums + part * kTile * R;
    d_table = p.d_table + part * R * D;
  }
  __device__ void start() const {
    for (int e = static_cast<int>(threadIdx.x); e < R * D; e += kThreads) d_table[e] = 0;
  }
  __device__ void start_tile(const Tile& tile) const {
    for (int r = tile.member; r < R; r += kTeam) sums[tile.local * R + r] = 0;
  }
  // ds of the thread's query with the keys [first, end), as far as they fit a tile.
  __device__ void add(const Tile& tile, const float* ds, int query_row, const GpuHeadLists& keys,
                      int first, int end) const {
#pragma unroll 1
    for (int j = 0; j < kTile && first + j < end; ++j) {
      const int r = distance_of(p.relative, query_row, keys.row(first + j));
      if (r % kTeam == tile.member) sums[tile.local * R + r] += ds[j];
    }
  }
  // d_q_id += scale sum_r G_ir a_rd of the thread's query, whose d_q it wrote, and
  // d_table_rd += sum_i G_ir q_id. All threads call it; the next tile may follow.
  __device__ void finish_tile(const Tile& tile, const RowTile& q, const float* table,
                              float* d_q) const {
    __syncthreads();
#pragma unroll 1
    for (int d = tile.member; tile.slot < tile.end && d < D; d += kTeam) {
      float sum = 0;
      for (int r = 0; r < R; ++r) sum += sums[tile.local * R + r] * table[r * D + d];
      d_q[d] += sum * p.scale;
    }
#pragma unroll 1
    for (int e = static_cast<int>(threadIdx.x); e < R * D; e += kThreads) {
      float sum = 0;
      for (int i = 0; i < kTile; ++i) sum += sums[i * R + e / D] * q.row(i)[e % D];
      d_table[e] += sum;
    }
    __syncthreads();
  }
};

}  // namespace
}  // namespace birkhoff
