// Products of rows with the vectors of their head: centroids (gpu_clusters.cu) or the mean keys of
// blocks (block_top_k/gpu_top_k.cu). For these files only.
//
// A warp owns 16 rows of a head, and the warps of a block share tiles of 32 vectors. Tensor cores
// multiply, nearly as exactly as fp32 does (common/gpu_split_tile.cuh): vectors have three terms,
// rows as many as hold their elements, one in bf16. Tensor cores may sum columns in any order; in
// tiles 2 j and 2 j + 1 the lanes of a row have the columns 32 j + 8 (lane % 4) and the next seven,
// which they load together. All rows take the same steps, so equal rows, and equal vectors, have
// equal products. An infinite element makes its products NaN.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "attention/kernels/common/gpu_row_team.cuh"
#include "attention/kernels/common/gpu_split_tile.cuh"
#include "cluster/base/gpu/elements.cuh"
#include "cluster/base/gpu/launch.h"
#include "cluster/base/gpu/warp.cuh"

namespace birkhoff {

extern __shared__ float4 score_memory[];  // float4 for its alignment

namespace {

constexpr int kScoreThreads = 128;  // of a block that multiplies
constexpr int kWarpRows = kSplitTile, kVectors = 2 * kSplitTile;
constexpr int kGroupColumns = 2 * kSplitTile;  // of two tiles
constexpr int kLanesOfRow = kGroupColumns / kTeamColumns;

inline int rows_of_block(int threads) { return threads / kWarp * kWarpRows; }

// The bf16 terms of an element.
template <typename T>
constexpr int kTermsOf = std::is_same_v<T, float>    ? SplitTile::kTerms
                         : std::is_same_v<T, __half> ? 2
                                                     : 1;

// The rows of a head that a warp owns: tile after tile, head after head.
struct OwnRows {
  std::int64_t number;  // index of the head in [B, H]
  GpuHead head;
  int first, count;  // count may be 0 or less
  int block_end;     // the row after the last of all warps of the block

  __device__ OwnRows(int heads, int rows) {
    const int of_block = static_cast<int>(blockDim.x) / kWarp * kWarpRows;
    const auto tiles = static_cast<unsigned>((rows + of_block - 1) / of_block);
    number = blockIdx.x / tiles;
    head = {static_cast<int>(number / heads), static_cast<int>(number % heads)};
    const int block_first = static_cast<int>(blockIdx.x % tiles) * of_block;
    first = block_first + warp_number() * kWarpRows;
    count = min(kWarpRows, rows - first);
    block_end = min(block_first + of_block, rows);
  }
};

// The rows lane / 4 and lane / 4 + 8 of 16, of which `count` exist; the others are 0.
template <typename T>
struct LaneRows {
  const T* rows[2];
  bool exists[2];

  __device__ LaneRows(const T* first, std::int64_t stride, int count) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      exists[i] = number(i) < count;
      rows[i] = first + (exists[i] ? number(i) * stride : 0);
    }
  }
  __device__ static int number(int i) { return lane_number() / kLanesOfRow + i * 8; }
  // Calls use(d) for the first column of each of the lane's runs.
  template <typename Use>
  __device__ static void visit_runs(int head_dim, Use use) {
#pragma unroll 2
    for (int d = lane_number() % kLanesOfRow * kTeamColumns; d < head_dim; d += kGroupColumns) {
      use(d);
    }
  }
  __device__ void load(int first, int head_dim, float (&runs)[2][kTeamColumns]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) load_run(rows[i], first, exists[i] ? head_dim : 0, runs[i]);
  }
};

// The lane's part of tile n of a group of columns.
__device__ inline SplitTile split_tile(const float (&runs)[2][kTeamColumns], int n) {
  SplitTile tile;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    tile.set(i, runs[i][n * 4], runs[i][n * 4 + 1]);
    tile.set(i + 2, runs[i][n * 4 + 2], runs[i][n * 4 + 3]);
  }
  return tile;
}

// kVectors vectors in shared memory, at its start: for each group of columns, for each half of the
// vectors, two tiles.
struct VectorTile {
  int head_dim;

  static BIRKHOFF_HOST_DEVICE int groups(int head_dim) {
    return (head_dim + kGroupColumns - 1) / kGroupColumns;
  }
  static BIRKHOFF_HOST_DEVICE std::size_t bytes(int head_dim) {
    return sizeof(Words) * static_cast<std::size_t>(groups(head_dim) * 4 * SplitTile::kWords);
  }
  __device__ static Words* tile(int group, int half, int n) {
    return reinterpret_cast<Words*>(score_memory) + (group * 4 + half * 2 + n) * SplitTile::kWords;
  }
  // `count` vectors, then zeros. All threads of the block call it, between barriers.
  __device__ void load(const float* vectors, int count) const {
    const int warps = static_cast<int>(blockDim.x) / kWarp;
#pragma unroll 1
    for (int task = warp_number(); task < groups(head_dim) * 2; task += warps) {
      const int group = task / 2, half = task % 2;
      const LaneRows<float> rows(
          vectors + (half * kSplitTile < count ? std::int64_t{half} * kSplitTile * head_dim : 0),
          head_dim, count - half * kSplitTile);
      float runs[2][kTeamColumns];
      rows.load(group * kGroupColumns + lane_number() % kLanesOfRow * kTeamColumns, head_dim, runs);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        split_tile(runs, n).store(tile(group, half, n), lane_number());
      }
    }
  }
};

// The products of a warp's rows with a tile of vectors.
class Products {
 public:
  // All lanes of the warp call it. Calls use(i, run) for each run of the lane's rows.
  template <typename T, typename Use>
  __device__ Products(const LaneRows<T>& rows, const VectorTile& vectors, Use use) {
#pragma unroll 1
    for (int group = 0; group < VectorTile::groups(vectors.head_dim); ++group) {
      float runs[2][kTeamColumns];
      rows.load(group * kGroupColumns + lane_number() % kLanesOfRow * kTeamColumns,
                vectors.head_dim, runs);
#pragma unroll
      for (int i = 0; i < 2; ++i) use(i, runs[i]);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const SplitTile left[1] = {split_tile(runs, n)};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          SplitTile right;
          right.load(VectorTile::tile(group, half, n), lane_number());
          add_products<kTermsOf<T>>(sums_[half], left, right);
        }
      }
    }
  }

  // Calls use(i, v, product) for the lane's products of row LaneRows::number(i) with vector v of
  // the tile; for each row v ascends.
  template <typename Use>
  __device__ void for_each(Use use) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        const int v = half * kSplitTile + tile_column(lane_number(), pair);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          use(pair % 2, v + n, sums_[half][0][pair / 2][pair % 2 * 2 + n]);
        }
      }
    }
  }

 private:
  float sums_[2][1][2][4] = {};
};

// One block of `threads` for each tile of rows of each head.
template <typename... Parameters, typename... Arguments>
void launch_tiles(void (*kernel)(Parameters...), std::int64_t heads, int rows, int threads,
                  std::size_t bytes, cudaStream_t stream, const Arguments&... arguments) {
  const int of_block = rows_of_block(threads);
  launch({.blocks = heads * ((rows + of_block - 1) / of_block),
          .threads = threads,
          .stream = stream,
          .shared_bytes = bytes},
         kernel, arguments...);
}

}  // namespace
}  // namespace birkhoff
