// The memory of the kernels in gpu_prefix.cu, and how a block solves a panel of prefixes in the
// ordinary domain. gpu_prefix.cu has the formulas.
#pragma once

#include <cstddef>

#include "attention/kernels/sinkhorn/gpu_log_domain.cuh"
#include "attention/kernels/sinkhorn/gpu_split_tile.cuh"
#include "attention/kernels/sinkhorn/range.h"

namespace birkhoff {
namespace {

// As many threads as a matrix can have prefixes.
constexpr int kThreads = BalanceParams::kMaxBlocks, kWarps = kThreads / kWarp;
constexpr int kTile = BalanceParams::kTile;
constexpr int kSubtiles = kTile / kSplitTile;  // along a side

// A problem that has left the number range, solved by a block of the same size as all blocks here.
template <int kGroups>
using LogDomain = LogDomainProblem<kGroups, kWarps, false>;

// exp(s), 0 where s is out of range.
__device__ inline float exponential(float s) {
  return fabsf(s) <= DeviceBalanceRange::kSpread ? expf(s) : 0.0f;
}

// The scratch memory of a call: for each matrix E and its transpose, in tiles as the right operands
// of products; the limits of its larger tiles; and for each problem whether it is solved in the log
// domain.
struct Scratch {
  int side;              // of a matrix, in tiles of 16 x 16
  int tiles;             // of 32 x 32
  float4* e;             // [matrices, 2, side, side, 2 halves of a lane's numbers, 32 lanes]
  float* limits;         // [matrices, tiles]: the first prefix that is out of range
  float* in_log_domain;  // [matrices, results]: 1 or 0

  __device__ explicit Scratch(const BalanceParams& p)
      : side((p.rows + kTile - 1) / kTile * kSubtiles),
        tiles(p.num_tiles()),
        e(reinterpret_cast<float4*>(p.scratch)),
        limits(p.scratch + p.matrices * 2 * tiles * kTile * kTile),
        in_log_domain(limits + p.matrices * tiles) {}

  // The tiles of the right operand, which is transposed: row n of the tiles belongs to entries
  // 16 n .. 16 n + 15 of a step's result. kColumnStep: from rows to columns.
  template <bool kColumnStep>
  __device__ float4* factor(std::int64_t matrix) const {
    return e + (matrix * 2 + (kColumnStep ? 0 : 1)) * side * side * (2 * kWarp);
  }
};

// The vectors of a prefix. Vectors of successive prefixes lie one after another.
struct PrefixVectors : Vectors {
  __device__ PrefixVectors(const BalanceBackwardParams& p, std::int64_t matrix, int result)
      : Vectors(p, 0) {
    const BalanceParams& problems = p.problems;
    const int u = problems.first_row + result;
    rows = columns = BalanceBackwardParams::prefix_length(u);
    data = p.vectors + matrix * BalanceBackwardParams::vectors_per_matrix(problems) +
           4 * problems.iterations *
               (BalanceBackwardParams::lengths_before(u) -
                BalanceBackwardParams::lengths_before(problems.first_row));
  }
};

// A panel of prefixes, as its block sees it. kGroups: 4, 8 for N <= 128, 256. A step is a product
// of tiles of 16 x 16: each warp owns tiles of the result, and each thread always the same elements
// of them.
template <int kGroups>
struct Panel {
  static constexpr int kPrefixes = 32;
  static constexpr int kRowTiles = kPrefixes / kSplitTile;
  static constexpr int kOwnColumns = kGroups / 4;  // tiles
  using Sums = float[kOwnColumns][kRowTiles][2][4];

  int size, matrix, first_prefix;
  int last;                                  // prefix of the panel
  const float* scores;                       // of this matrix
  const float4 *column_factor, *row_factor;  // likewise
  int side, warp, lane;

  // Blocks of the longest prefixes come first: they take longest.
  __device__ explicit Panel(const BalanceParams& p)
      : size(p.rows),
        warp(static_cast<int>(threadIdx.x) / kWarp),
        lane(static_cast<int>(threadIdx.x) % kWarp) {
    const int panels = num_panels(p.results);
    const int index = panels - 1 - static_cast<int>(blockIdx.x / p.matrices);
    matrix = static_cast<int>(blockIdx.x % p.matrices);
    first_prefix = p.first_row + index * kPrefixes;
    last = min(first_prefix + kPrefixes, size) - 1;
    scores = p.scores + std::int64_t{matrix} * size * size;
    const Scratch scratch(p);
    side = scratch.side;
    column_factor = scratch.factor<true>(matrix);
    row_factor = scratch.factor<false>(matrix);
    float limit = static_cast<float>(size);
    for (int tile = 0; tile < scratch.tiles; ++tile) {
      limit = fminf(limit, scratch.limits[std::int64_t{matrix} * scratch.tiles + tile]);
    }
    for (int k = static_cast<int>(threadIdx.x); k < kPrefixes; k += kThreads) {
      failed()[k] = static_cast<float>(first_prefix + k) >= limit ? 1.0f : 0.0f;
    }
  }

  // Shared memory: [kPrefixes], 1 where a prefix is not solved; [side, kRowTiles], the left operand
  // of a step.
  __device__ static float* failed() { return reinterpret_cast<float*>(balance_memory); }
  __device__ static Words* left() { return reinterpret_cast<Words*>(failed() + kPrefixes); }
  // The tile with element j of prefix k.
  __device__ static Words* left_tile(int k, int j) {
    return left() + (j / kSplitTile * kRowTiles + k / kSplitTile) * SplitTile::kWords;
  }
  __device__ static float get_left(int k, int j) {
    return SplitTile::get_from(left_tile(k, j), k % kSplitTile, j % kSplitTile);
  }
  __device__ static void set_left(int k, int j, float x) {
    SplitTile::set_in(left_tile(k, j), k % kSplitTile, j % kSplitTile, x);
  }

  __host__ __device__ static int num_panels(int results) {
    return (results + kPrefixes - 1) / kPrefixes;
  }
  // The log domain uses the memory from left() on and needs less of it.
  static std::size_t shared_bytes(int rows) {
    const int tiles = (rows + kTile - 1) / kTile * kSubtiles * kRowTiles;
    return sizeof(float) * kPrefixes +
           sizeof(Words) * static_cast<std::size_t>(tiles * SplitTile::kWords);
  }

  // The number of tiles that hold the panel's row vectors (r <= u) or column vectors (c < u).
  template <bool kRows>
  __device__ int num_tiles() const {
    return (last + (kRows ? 1 : 0) + kSplitTile - 1) / kSplitTile;
  }
  __device__ int own_column_tile(int n) const { return warp + n * kWarps; }

  // left = update(x), row vectors with kRows, otherwise column vectors. update(k, j, x) changes
  // elements j and j + 1 of prefix k. Elements beyond the prefix become 0. All threads of the block
  // call this; when it returns, they see what `update` wrote.
  template <bool kRows, typename Update>
  __device__ void update_left(const Sums& x, Update update) const {
    __syncthreads();
#pragma unroll
    for (int n = 0; n < kOwnColumns; ++n) {
      const int tile = own_column_tile(n);
      if (tile >= num_tiles<kRows>()) continue;
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        SplitTile split;
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
          const int k = m * kSplitTile + tile_row(lane, pair);
          const int j = tile * kSplitTile + tile_column(lane, pair);
          const int end = first_prefix + k < size ? first_prefix + k + (kRows ? 1 : 0) : 0;
          const float* from = x[n][m][pair / 2] + pair % 2 * 2;
          float two[2] = {j < end ? from[0] : 0.0f, j + 1 < end ? from[1] : 0.0f};
          if (j < end) update(k, j, two);
          split.set(pair, two[0], two[1]);
        }
        split.store(left_tile(m * kSplitTile, tile * kSplitTile), lane);
      }
    }
    __syncthreads();
  }

  // left = update(left factor), where the factor is E (kColumnStep) or its transpose.
  template <bool kColumnStep, typename Update>
  __device__ void step(Update update) const {
    const int depth = num_tiles<kColumnStep>(), columns = num_tiles<!kColumnStep>();
    const float4* factor = (kColumnStep ? column_factor : row_factor) + lane;
    Sums sums = {};
#pragma unroll 1
    for (int d = 0; d < depth; ++d) {
      float4 now[kOwnColumns][2];
#pragma unroll
      for (int n = 0; n < kOwnColumns; ++n) {
        if (own_column_tile(n) >= columns) continue;
        const float4* from = factor + (own_column_tile(n) * side + d) * (2 * kWarp);
        now[n][0] = from[0];
        now[n][1] = from[kWarp];
      }
      SplitTile tiles[kRowTiles];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        tiles[m].load(left_tile(m * kSplitTile, d * kSplitTile), lane);
      }
#pragma unroll
      for (int n = 0; n < kOwnColumns; ++n) {
        if (own_column_tile(n) >= columns) continue;
        SplitTile e;
        e.set(0, now[n][0].x, now[n][0].y);
        e.set(1, now[n][0].z, now[n][0].w);
        e.set(2, now[n][1].x, now[n][1].y);
        e.set(3, now[n][1].z, now[n][1].w);
        add_products(sums[n], tiles, e);
      }
    }
    update_left<!kColumnStep>(sums, update);
  }

  // 1 / x where x > 0, else 0. Marks prefix k as failed if x is out of range.
  __device__ float inverse(float x, int k) const {
    if (x == 0) return 0;
    if (!(x > DeviceBalanceRange::kMin && x < 1 / DeviceBalanceRange::kMin)) failed()[k] = 1;
    return 1 / x;
  }

  // Runs all column steps and the row steps between them; each_a(i, k, j, x) and each_b(i, k, j, x)
  // receive a_ui and b_ui. Then runs the last row step, for row u only: one warp per prefix calls
  // each_result(k, u, 1 / a_uI[u]), the same in all lanes, with b_u,I-1 in `left`.
  template <typename EachA, typename EachB, typename EachResult>
  __device__ void solve(int iterations, EachA each_a, EachB each_b, EachResult each_result) const {
    Sums ones;
#pragma unroll
    for (int n = 0; n < kOwnColumns * kRowTiles * 8; ++n) (&ones[0][0][0][0])[n] = 1;
    update_left<true>(ones, [&](int k, int j, float(&x)[2]) { each_a(0, k, j, x); });
    for (int i = 0; i < iterations; ++i) {
      if (i > 0) {
        step<false>([&](int k, int j, float(&x)[2]) {
          x[0] = inverse(x[0], k);
          x[1] = inverse(x[1], k);
          each_a(i, k, j, x);
        });
      }
      step<true>([&](int k, int j, float(&x)[2]) {
        x[0] = inverse(x[0], k);
        x[1] = inverse(x[1], k);
        each_b(i, k, j, x);
      });
    }
    for (int k = warp; k < kPrefixes; k += kWarps) {
      const int u = first_prefix + k;
      if (u >= size) break;
      float sum = 0;
      for (int c = lane; c < u; c += kWarp)
        sum += exponential(scores[u * size + c]) * get_left(k, c);
      sum = warp_sum(sum);
      inverse(sum, k);  // P is a quotient: 1 where it has one term
      each_result(k, u, sum > 0 ? sum : 1.0f);
    }
    __syncthreads();
  }
};

}  // namespace
}  // namespace birkhoff
