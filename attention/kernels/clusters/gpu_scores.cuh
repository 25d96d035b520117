// Products of a tile of rows with the vectors of a head: centroids (gpu_clusters.cu) or the mean
// keys of blocks (block_choice/gpu_choice.cu). For these files only. A block of kThreads threads
// owns kTile rows; lane l of each warp owns row l, and warp w the vectors w, w + kWarps, .. of a
// tile.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cluster/base/gpu/elements.cuh"
#include "cluster/base/gpu/launch.h"

namespace birkhoff {

extern __shared__ float4 score_memory[];  // float4 for its alignment

namespace {

constexpr int kThreads = 256, kWarp = 32, kWarps = kThreads / kWarp;
constexpr int kTile = kWarp;            // rows, and vectors, of a tile
constexpr int kPairs = kTile / kWarps;  // of a thread's row with the vectors of a tile
constexpr unsigned kAllLanes = 0xffffffff;

__device__ inline int lane_number() { return static_cast<int>(threadIdx.x) % kWarp; }
__device__ inline int warp_number() { return static_cast<int>(threadIdx.x) / kWarp; }

__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    x += __shfl_xor_sync(kAllLanes, x, distance);
  }
  return x;
}

struct HeadOfSample {
  std::int64_t b, h;
};

template <typename T>
__device__ inline T* row_of(const RowsParams& x, HeadOfSample head, std::int64_t row) {
  return static_cast<T*>(x.data) + head.b * x.strides[0] + head.h * x.strides[1] +
         row * x.strides[2];
}

// The rows of a head that a block owns: its tiles come one after another, head after head.
struct OwnRows {
  std::int64_t number;  // of the head, in [B, H]
  HeadOfSample head;
  int first, count;

  __device__ OwnRows(int heads, int rows) {
    const auto tiles = static_cast<unsigned>((rows + kTile - 1) / kTile);
    number = blockIdx.x / tiles;
    head = {number / heads, number % heads};
    first = static_cast<int>(blockIdx.x % tiles) * kTile;
    count = min(kTile, rows - first);
  }
};

// Vectors in shared memory, an odd number of words apart: the lanes of a warp read the same column
// of their rows from different banks.
struct ScoreTile {
  float* data;
  int pitch;

  static BIRKHOFF_HOST_DEVICE int words(int head_dim) { return kTile * (head_dim | 1); }
  __device__ ScoreTile(int number, int head_dim)
      : data(reinterpret_cast<float*>(score_memory) + number * words(head_dim)),
        pitch(head_dim | 1) {}

  __device__ float* row(int i) const { return data + i * pitch; }
  // `count` rows, then zeros. All threads call it; the lanes of a warp load whole rows.
  template <typename T>
  __device__ void load(const T* rows, std::int64_t stride, int count, int head_dim) const {
    for (int i = warp_number(); i < kTile; i += kWarps) {
      for (int d = lane_number(); d < head_dim; d += kWarp) {
        row(i)[d] = i < count ? to_float(rows[i * stride + d]) : 0.0f;
      }
    }
  }
};

// The products of the thread's row with its vectors. The order is that of d for each of them, so
// equal rows and equal vectors have equal products.
__device__ inline void multiply(const ScoreTile& rows, const ScoreTile& vectors, int head_dim,
                                float (&products)[kPairs]) {
#pragma unroll
  for (int n = 0; n < kPairs; ++n) products[n] = 0;
  const float* const row = rows.row(lane_number());
  const float* const vector = vectors.row(warp_number());
#pragma unroll 4
  for (int d = 0; d < head_dim; ++d) {
    const float x = row[d];
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      products[n] = fmaf(x, vector[n * kWarps * vectors.pitch + d], products[n]);
    }
  }
}

// One block for each tile of the rows of each head.
template <typename... Parameters, typename... Arguments>
void launch_tiles(void (*kernel)(Parameters...), std::int64_t heads, int rows, std::size_t bytes,
                  cudaStream_t stream, const Arguments&... arguments) {
  cuda_check(
      cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                           cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
      "cudaFuncSetAttribute");
  launch({.grid = dim3(static_cast<unsigned>(heads * ((rows + kTile - 1) / kTile))),
          .block = dim3(kThreads),
          .stream = stream,
          .shared_bytes = bytes},
         kernel, arguments...);
}

// Calls f<T>() with the number type of rows.
template <typename Function>
void with_row_type(KernelDtype dtype, Function f) {
  if (dtype == KernelDtype::kBFloat16) return f.template operator()<__nv_bfloat16>();
  if (dtype == KernelDtype::kHalf) return f.template operator()<__half>();
  f.template operator()<float>();
}

}  // namespace
}  // namespace birkhoff
