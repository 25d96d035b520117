// Products of fp32 tiles on tensor cores, nearly as exact as in fp32: each element is split into
// three bf16 terms, x = high + middle + low, which together hold its 24 bits, and of the nine
// products of terms the six largest are summed. The omitted terms are below 2^-23 of the product.
#pragma once

#include <cstdint>

#include "cluster/base/gpu/gpu_thread.cuh"
#include "cluster/base/gpu/kernel_source.h"

namespace birkhoff {
namespace {

// A tile of 16 x 16 elements as a lane of a warp holds it: pairs 0 to 3 of elements in adjacent
// columns. Tensor cores sum over columns: mma.m16n8k16 takes the four pairs as its left operand, or
// pairs n and n + 2 as its right operand with columns 8 n .. 8 n + 7 of the product.
constexpr int kSplitTile = 16;
__device__ inline int tile_row(int lane, int pair) { return lane / 4 + pair % 2 * 8; }
__device__ inline int tile_column(int lane, int pair) { return lane % 4 * 2 + pair / 2 * 8; }

// The terms of a lane's elements. In memory each term of a tile is [32 lanes].
struct SplitTile {
  static constexpr int kTerms = 3;
  static constexpr int kWords = kTerms * 32;  // of a tile in memory

  Words terms[kTerms];  // the largest first

  __device__ void set(int pair, float x, float y) {
    const GpuThread<__nv_bfloat16> thread;
#pragma unroll
    for (int term = 0; term < kTerms; ++term) {
      const std::uint32_t word = thread.pack(x, y);
      terms[term].words[pair] = word;
      x -= thread.unpack(static_cast<std::uint16_t>(word & 0xffff));
      y -= thread.unpack(static_cast<std::uint16_t>(word >> 16));
    }
  }

  // A single element of a tile in memory.
  __device__ static void set_in(Words* tile, int row, int column, float x) {
    const GpuThread<__nv_bfloat16> thread;
#pragma unroll
    for (int term = 0; term < kTerms; ++term) {
      const std::uint32_t word = thread.pack(x, 0);
      half_in(tile, term, row, column) = static_cast<std::uint16_t>(word);
      x -= thread.unpack(static_cast<std::uint16_t>(word));
    }
  }
  __device__ static float get_from(Words* tile, int row, int column) {
    const GpuThread<__nv_bfloat16> thread;
    float x = 0;  // the sum is exact from the smallest term on
#pragma unroll
    for (int term = kTerms - 1; term >= 0; --term) {
      x += thread.unpack(half_in(tile, term, row, column));
    }
    return x;
  }

  __device__ void load(const Words* tile, int lane) {
#pragma unroll
    for (int term = 0; term < kTerms; ++term) terms[term] = tile[term * 32 + lane];
  }
  __device__ void store(Words* tile, int lane) const {
#pragma unroll
    for (int term = 0; term < kTerms; ++term) tile[term * 32 + lane] = terms[term];
  }

 private:
  __device__ static std::uint16_t& half_in(Words* tile, int term, int row, int column) {
    const int lane = row % 8 * 4 + column % 8 / 2, pair = row / 8 + column / 8 * 2;
    return reinterpret_cast<std::uint16_t*>(tile + term * 32 + lane)[pair * 2 + column % 2];
  }
};

// sums += left right^T for each left tile, of whose elements the first kLeftTerms terms may differ
// from 0; sums[m] holds pair p of the product in [p / 2][p % 2 * 2 ..]. All lanes of a warp call
// it. Tensor cores truncate their sums, so the products of terms (six, or fewer) start from zero,
// the smallest first, and are added here.
template <int kLeftTerms = SplitTile::kTerms, int kTiles>
__device__ inline void add_products(float (&sums)[kTiles][2][4], const SplitTile (&left)[kTiles],
                                    const SplitTile& right) {
  const GpuThread<__nv_bfloat16> thread;
  float parts[kTiles][2][4] = {};
#pragma unroll
  for (int order = SplitTile::kTerms - 1; order >= 0; --order) {
#pragma unroll
    for (int term = 0; term <= order && term < kLeftTerms; ++term) {
      const Words& factor = right.terms[order - term];
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          thread.multiply(parts[m][n], left[m].terms[term].words, factor.words[n],
                          factor.words[n + 2]);
        }
      }
    }
  }
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int k = 0; k < 4; ++k) sums[m][n][k] += parts[m][n][k];
    }
  }
}

}  // namespace
}  // namespace birkhoff
