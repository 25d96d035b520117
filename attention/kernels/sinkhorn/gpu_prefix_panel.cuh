// The memory of the kernels in gpu_prefix.cu, and how a block solves a panel of prefixes in the
// ordinary domain. gpu_prefix.cu has the formulas.
#pragma once

#include <cstddef>

#include "attention/kernels/common/gpu_split_tile.cuh"
#include "attention/kernels/sinkhorn/gpu_prefixes.cuh"

namespace birkhoff {
namespace {

constexpr int kSubtiles = kTile / kSplitTile;  // along a side

// For each matrix E and its transpose, in tiles as the right operands of products.
struct Scratch : PrefixScratch {
  int side;   // of a matrix, in tiles of 16 x 16
  float4* e;  // [matrices, 2, side, side, 2 halves of a lane's numbers, 32 lanes]

  __device__ explicit Scratch(const BalanceParams& p)
      : PrefixScratch(p),
        side((p.rows + kTile - 1) / kTile * kSubtiles),
        e(reinterpret_cast<float4*>(p.scratch)) {}

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
struct Panel : PrefixPanel<32> {
  using LogDomain = LogDomainProblem<kGroups, kWarps, false>;
  static constexpr int kRowTiles = kPrefixes / kSplitTile;
  static constexpr int kOwnColumns = kGroups / 4;  // tiles
  using Sums = float[kOwnColumns][kRowTiles][2][4];

  int last;                                  // prefix of the panel
  const float* scores;                       // of this matrix
  const float4 *column_factor, *row_factor;  // likewise
  int side;

  __device__ explicit Panel(const BalanceParams& p) : PrefixPanel(p) {
    last = min(first_prefix + kPrefixes, size) - 1;
    scores = p.scores + std::int64_t{matrix} * size * size;
    const Scratch scratch(p);
    side = scratch.side;
    column_factor = scratch.factor<true>(matrix);
    row_factor = scratch.factor<false>(matrix);
  }
  __device__ static PrefixVectors vectors_of(const BalanceBackwardParams& p, std::int64_t matrix,
                                             int result) {
    return {p, matrix, result};
  }

  // Shared memory: [side, kRowTiles], the left operand of a step.
  __device__ static Words* left() { return reinterpret_cast<Words*>(memory()); }
  // The tile with element j of prefix k.
  __device__ static Words* left_tile(int k, int j) {
    return left() + (j / kSplitTile * kRowTiles + k / kSplitTile) * SplitTile::kWords;
  }

  __device__ float e_at(int u, int c) const { return exponential(scores[u * size + c]); }
  __device__ static float b_at(int k, int j) {
    return SplitTile::get_from(left_tile(k, j), k % kSplitTile, j % kSplitTile);
  }
  __device__ static void set_y(int k, int j, float x, float* y) {
    y[j] = x;
    SplitTile::set_in(left_tile(k, j), k % kSplitTile, j % kSplitTile, x);
  }
  template <typename VectorsOf>
  __device__ void finish_y(VectorsOf, int) const {}  // x of the iteration is 0 and not read

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

  template <typename EachA>
  __device__ void start(EachA each_a) const {
    Sums ones;
#pragma unroll
    for (int n = 0; n < kOwnColumns * kRowTiles * 8; ++n) (&ones[0][0][0][0])[n] = 1;
    update_left<true>(ones, [&](int k, int j, float(&x)[2]) { each_a(0, k, j, x); });
  }
};

}  // namespace
}  // namespace birkhoff
