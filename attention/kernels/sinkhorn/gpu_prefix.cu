// The Sinkhorn operator for all prefixes of a matrix (attention/kernels/sinkhorn/sinkhorn.h,
// prefix_balance): forward and backward. Legend: r destination and c source of N, u prefix, i
// iteration of I, E = exp(S) and 0 where S is -inf. For prefix u, 1 <= r <= u and c < u: row 0 of E
// is 0.
//
//   b_ui[c] = 1 / sum_r a_ui[r] E[r, c]      a_u0 = 1
//   a_u,i+1[r] = 1 / sum_c E[r, c] b_ui[c]   P[u, c] = E[u, c] b_u,I-1[c] a_uI[u]
//
// Backward, from i = I - 1 down; d includes the share of the last row step, where it cancels best:
//
//   d_u[c] = P[u, c] (dLoss/dP[u, c] - sum_c' P[u, c'] dLoss/dP[u, c'])
//   x_ui[r] = 0, then -a_u,i+1[r]^2 sum_c E[r, c] y_u,i+1[c]
//   y_ui[c] = d_u[c] b_ui[c], then -b_ui[c]^2 sum_r x_ui[r] E[r, c]
//   dS[r, c] = d_r[c] - E[r, c] sum_ui (x_ui[r] b_ui[c] + a_ui[r] y_ui[c])
//
// 64 < N <= 256 (gpu_small_prefix.cu: fewer), fp32. Products are sums of tiles of 16 x 16 on tensor
// cores, as exact as in fp32 (gpu_split_tile.cuh). Tiles of which no prefix needs an element are
// skipped. The kernels run one after another:
//
// exponentials: a block of 256 threads writes E and its transpose for 32 x 32 scores, in the order
//   in which lanes read tiles, and the first prefix that holds a score too far from 0 (range.h).
//   There is no shift, so none can depend on later scores.
// forward, vectors: a block of 256 threads owns a panel of 32 successive prefixes of a matrix, so a
//   step is the product of its [32, N] scalings and E or its transpose. A warp owns 32 x 16 or, for
//   N > 128, twice 32 x 16 elements of the result. Scalings are in shared memory, split into terms,
//   18 to 48 KiB; E is read from L1 or L2 once per step and split by the warp that reads it.
//   Prefixes whose scores or sums leave the number range are solved again, one by one, in the log
//   domain (gpu_log_domain.cuh): in the forward pass by the same block, in the backward pass by a
//   separate kernel, log_domain. Nothing waits for the host.
// scores: a block of 256 threads owns a 64 x 64 tile of dS, which is a product over all (u, i). A
//   warp owns 32 x 32 elements of half of its terms. Shared memory: 24 KiB.
//
// Vectors are 0 beyond their prefix, so the bits of a prefix do not depend on later rows. No
// atomics and fixed orders: deterministic.
#include "attention/kernels/sinkhorn/gpu_params.h"
#include "attention/kernels/sinkhorn/gpu_prefix_panel.cuh"

namespace birkhoff {
namespace {

constexpr int kScoresTile = 64;  // side of a block's tile of dS

__global__ void __launch_bounds__(kThreads) exponentials_kernel(const BalanceParams p) {
  const Scratch scratch(p);
  const int tiles = p.num_tiles(), tiles_per_row = scratch.side / kSubtiles;
  const std::int64_t matrix = blockIdx.x / tiles;
  const int tile = static_cast<int>(blockIdx.x % tiles);
  const int r_tile = tile / tiles_per_row, c_tile = tile % tiles_per_row;
  const int warp = warp_number(), lane = lane_number();
  constexpr int kStride = kTile + 1;
  float* e = reinterpret_cast<float*>(balance_memory);  // [kTile, kStride]
  visit_exponentials(p, matrix, r_tile * kTile, c_tile * kTile, e + kTile * kStride,
                     scratch.limits[blockIdx.x],
                     [&](int row, int column, float x) { e[row * kStride + column] = x; });
  static_assert(kWarps == 2 * kSubtiles * kSubtiles);
  const bool column_step = warp % 2 == 0;
  const int r0 = warp / 2 / kSubtiles, c0 = warp / 2 % kSubtiles;  // in tiles of 16
  float x[8];
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const int row = tile_row(lane, n / 2), column = tile_column(lane, n / 2) + n % 2;
    x[n] = e[(r0 * kSplitTile + (column_step ? column : row)) * kStride + c0 * kSplitTile +
             (column_step ? row : column)];
  }
  const int r = r_tile * kSubtiles + r0, c = c_tile * kSubtiles + c0;
  float4* to = column_step ? scratch.factor<true>(matrix) + (c * scratch.side + r) * (2 * kWarp)
                           : scratch.factor<false>(matrix) + (r * scratch.side + c) * (2 * kWarp);
  to[lane] = {x[0], x[1], x[2], x[3]};
  to[kWarp + lane] = {x[4], x[5], x[6], x[7]};
}

// One tile of dS. For each i, half of the warps sum the products x b, the other half a y; they take
// turns, because the two terms cancel in part.
__global__ void __launch_bounds__(kThreads, 2) prefix_scores_kernel(const BalanceBackwardParams p) {
  constexpr int kTiles = kScoresTile / kSplitTile;  // along a side
  constexpr int kHalf = kWarps / 2;
  static_assert(kHalf == kTiles);  // each warp loads one tile of either side
  const BalanceParams& forward = p.problems;
  const Scratch scratch(forward);
  const int N = forward.rows, I = forward.iterations;
  const int side = (N + kScoresTile - 1) / kScoresTile;
  // The first tiles of a matrix take longest, so the first tiles of all matrices come first.
  const std::int64_t matrix = blockIdx.x % forward.matrices;
  const int tile = static_cast<int>(blockIdx.x / forward.matrices);
  const int r0 = tile / side * kScoresTile, c0 = tile % side * kScoresTile;
  const float* in_log_domain = scratch.in_log_domain + matrix * forward.results;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarp;
  const int warp = thread / kWarp % kHalf, half = thread / kWarp / kHalf;

  const bool any_failed =
      any_in_log_domain(in_log_domain, forward.results, reinterpret_cast<float*>(balance_memory));

  // [2 halves, left and right, kTiles]
  Words* left = reinterpret_cast<Words*>(balance_memory) + half * 2 * kTiles * SplitTile::kWords;
  Words* right = left + kTiles * SplitTile::kWords;
  // The first prefix that holds an entry is u = max(r, c + 1).
  const int first = max(max(r0, c0 + 1) - forward.first_row, 0);
  const int steps = (forward.results - first + kSplitTile - 1) / kSplitTile * I;
  // This lane's elements of the two tiles that its warp loads, for 16 prefixes and one i.
  float from_rows[8], from_columns[8];
  const auto load = [&](int step) {
    const int result = first + step / I * kSplitTile, i = step % I;
    const bool of_x = (half + step) % 2 == 0;
#pragma unroll
    for (int n = 0; n < 8; ++n) from_rows[n] = from_columns[n] = 0;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int k = result + tile_column(lane, n / 2 * 2) + n % 2, u = forward.first_row + k;
      if (k >= forward.results || (any_failed && in_log_domain[k] != 0)) continue;
      const PrefixVectors vectors(p, matrix, k);
      const float* rows = of_x ? vectors.x(i) : vectors.f(i);
      const float* columns = of_x ? vectors.g(i) : vectors.y(i);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const int offset = warp * kSplitTile + tile_row(lane, m);
        const int to = (n / 2 * 2 + m) * 2 + n % 2;
        // x_u,I-1 is 0.
        if (r0 + offset <= u && (!of_x || i + 1 < I)) from_rows[to] = rows[r0 + offset];
        if (c0 + offset < u) from_columns[to] = columns[c0 + offset];
      }
    }
  };
  const auto store = [&](const float(&x)[8], Words* to) {
    SplitTile split;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) split.set(pair, x[2 * pair], x[2 * pair + 1]);
    split.store(to + warp * SplitTile::kWords, lane);
  };

  float sums[2][2][2][4] = {};  // 2 x 2 tiles of this warp, [column tile][row tile]
  if (steps > 0) load(0);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    __syncthreads();
    store(from_rows, left);
    store(from_columns, right);
    __syncthreads();
    if (step + 1 < steps) load(step + 1);
    SplitTile rows[2];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      rows[m].load(left + (warp / 2 * 2 + m) * SplitTile::kWords, lane);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      SplitTile columns;
      columns.load(right + (warp % 2 * 2 + n) * SplitTile::kWords, lane);
      add_products(sums[n], rows, columns);
    }
  }

  // Adds the sums of both halves, then takes whole rows of the tile at a time.
  float* flow = reinterpret_cast<float*>(balance_memory);  // [kScoresTile, kScoresTile]
  __syncthreads();
  for (int turn = 0; turn < 2; ++turn) {
    if (half == turn) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
          for (int pair = 0; pair < 4; ++pair) {
            const int row = (warp / 2 * 2 + m) * kSplitTile + tile_row(lane, pair);
            const int column = (warp % 2 * 2 + n) * kSplitTile + tile_column(lane, pair);
            float* to = flow + row * kScoresTile + column;
            const float* sum = sums[n][m][pair / 2] + pair % 2 * 2;
            to[0] = turn == 0 ? sum[0] : to[0] + sum[0];
            to[1] = turn == 0 ? sum[1] : to[1] + sum[1];
          }
        }
      }
    }
    __syncthreads();
  }
  write_d_scores<Panel<4>, kScoresTile>(p, matrix, r0, c0, flow, any_failed);
}

// Calls use<Panel>().
template <typename Use>
void with_panel(int size, Use use) {
  if (size <= 128) return use.template operator()<Panel<4>>();
  use.template operator()<Panel<8>>();
}

}  // namespace

void launch_prefix_balance(const BalanceParams& params, cudaStream_t stream) {
  if (params.results == 0) return;
  launch_exponentials(&exponentials_kernel, params, stream);
  with_panel(params.rows, [&]<typename Panel>() {
    launch_panels<Panel>(&prefix_forward_kernel<Panel>, params, params, stream);
  });
}

void launch_prefix_balance_backward(const BalanceBackwardParams& params, cudaStream_t stream) {
  const BalanceParams& problems = params.problems;
  launch_exponentials(&exponentials_kernel, problems, stream);
  with_panel(problems.rows, [&]<typename Panel>() { launch_vectors<Panel>(params, stream); });
  const int side = (problems.rows + kScoresTile - 1) / kScoresTile;
  launch_blocks(&prefix_scores_kernel, problems.matrices * side * side, params,
                sizeof(Words) * 4 * (kScoresTile / kSplitTile) * SplitTile::kWords, stream);
}

}  // namespace birkhoff
