// Products of a tile of rows with the vectors of a head: centroids (gpu_clusters.cu) or the mean
// keys of blocks (block_top_k/gpu_top_k.cu). For these files only. A block of kThreads threads
// owns kRows kWarp rows; lane l of each warp has the rows l, l + kWarp, .., and warp w the vectors
// w, w + kWarps, .. of a tile.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/kernels/common/gpu_row_team.cuh"
#include "cluster/base/gpu/elements.cuh"
#include "cluster/base/gpu/launch.h"
#include "cluster/base/gpu/warp.cuh"

namespace birkhoff {

extern __shared__ float4 score_memory[];  // float4 for its alignment

namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kVectors = kWarp;            // vectors of a tile
constexpr int kPairs = kVectors / kWarps;  // of a row with the vectors of a tile, in one thread

// The kRows kWarp rows of a head that a block owns: tile after tile, head after head.
template <int kRows>
struct OwnRows {
  static constexpr int kCount = kRows * kWarp;
  std::int64_t number;  // index of the head in [B, H]
  GpuHead head;
  int first, count;

  __device__ OwnRows(int heads, int rows) {
    const auto tiles = static_cast<unsigned>((rows + kCount - 1) / kCount);
    number = blockIdx.x / tiles;
    head = {static_cast<int>(number / heads), static_cast<int>(number % heads)};
    first = static_cast<int>(blockIdx.x % tiles) * kCount;
    count = min(kCount, rows - first);
  }
};

// Calls use(i, member) for the rows i of kCount that the thread's team owns.
template <int kCount, typename Use>
__device__ inline void visit_rows(Use use) {
  constexpr int kTeams = kThreads / kRowTeam;
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll 2
  for (int n = 0; n < kCount / kTeams; ++n) use(n * kTeams + thread / kRowTeam, thread % kRowTeam);
}

// kCount vectors in shared memory. They are read four columns at a time, so zeros follow the last
// one, and rows are an odd number of such runs apart: lanes read the same columns of their rows
// from different banks.
template <int kCount>
struct ScoreTile {
  float* data;
  int pitch;

  static BIRKHOFF_HOST_DEVICE int pitch_for(int head_dim) { return ((head_dim + 3) / 4 | 1) * 4; }
  static BIRKHOFF_HOST_DEVICE int words(int head_dim) { return kCount * pitch_for(head_dim); }
  // Begins at element `first`, a multiple of 4, of the dynamic shared memory.
  __device__ ScoreTile(int first, int head_dim)
      : data(reinterpret_cast<float*>(score_memory) + first), pitch(pitch_for(head_dim)) {}

  __device__ float* row(int i) const { return data + i * pitch; }
  // A run of row i, with zeros after the row's end.
  __device__ void store(int i, int first, const float (&run)[kTeamColumns]) const {
#pragma unroll
    for (int c = 0; c < kTeamColumns; c += 4) {
      if (first + c >= pitch) break;
      *reinterpret_cast<float4*>(row(i) + first + c) = {run[c], run[c + 1], run[c + 2], run[c + 3]};
    }
  }
  // `count` rows, then zeros. All threads call it.
  template <typename T>
  __device__ void load(const T* rows, std::int64_t stride, int count, int head_dim) const {
    visit_rows<kCount>([&](int i, int member) {
      visit_runs(member, head_dim, [&](int first) {
        float run[kTeamColumns];
        load_run(rows + (i < count ? i * stride : 0), first, i < count ? head_dim : 0, run);
        store(i, first, run);
      });
    });
  }
};

// The products of the thread's rows, lane + i kWarp, with its vectors, warp + n kWarps, of which
// the tile has `count`. Each is summed in the order of d, so equal rows and equal vectors have
// equal products.
template <int kRows>
__device__ inline void multiply(const ScoreTile<kRows * kWarp>& rows,
                                const ScoreTile<kVectors>& vectors, int count, int head_dim,
                                float (&products)[kRows][kPairs]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int n = 0; n < kPairs; ++n) products[i][n] = 0;
  }
  const float* const row = rows.row(lane_number());
  const float* const vector = vectors.row(warp_number());
  for (int d = 0; d < head_dim; d += 4) {
    float4 x[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      x[i] = *reinterpret_cast<const float4*>(row + i * kWarp * rows.pitch + d);
    }
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      if (warp_number() + n * kWarps >= count) break;
      const float4 y = *reinterpret_cast<const float4*>(vector + n * kWarps * vectors.pitch + d);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        float& sum = products[i][n];
        sum = fmaf(x[i].w, y.w, fmaf(x[i].z, y.z, fmaf(x[i].y, y.y, fmaf(x[i].x, y.x, sum))));
      }
    }
  }
}

// Rows per thread: enough for a block of threads, but few enough for two blocks on a
// multiprocessor.
inline constexpr int kManyRows = 4, kFewRows = 1;
template <typename Bytes>  // of shared memory for this number of rows
bool has_room_for_many(Bytes bytes_for) {
  return bytes_for(kManyRows) <= 80 * 1024;
}

// One block for each tile of kRows kWarp rows of each head.
template <int kRows, typename... Parameters, typename... Arguments>
void launch_tiles(void (*kernel)(Parameters...), std::int64_t heads, int rows, std::size_t bytes,
                  cudaStream_t stream, const Arguments&... arguments) {
  constexpr int kCount = OwnRows<kRows>::kCount;
  launch({.blocks = heads * ((rows + kCount - 1) / kCount),
          .threads = kThreads,
          .stream = stream,
          .shared_bytes = bytes},
         kernel, arguments...);
}

}  // namespace
}  // namespace birkhoff
