// The kernels of gpu_prefix.cu for N <= 64, where waiting for tensor cores takes longer than fp32
// sums. gpu_prefix.cu has the legend and the formulas. They run one after another:
//
// exponentials: a block of 256 threads writes a 32 x 32 tile of E and of its transpose, and the
//   first prefix that holds a score too far from 0 (range.h).
// forward, vectors: a block of 256 threads owns a panel of 16 successive prefixes of a matrix, so a
//   step is the product of its [16, N] scalings and E or its transpose. A thread owns 8 x 4
//   elements of the result. The 8 warps share the terms, and their sums are added up in a fixed
//   order.
//   Scalings and sums are in shared memory, up to 39 KiB. Each step reads E once, from L1.
//   log_domain solves prefixes that leave the number range, as in gpu_prefix.cu.
// scores: a block of 256 threads owns a 32 x 32 tile of dS. The tile is a matrix product over all
//   (u, i), of which each group of 64 threads takes a quarter. Shared memory: 16 KiB.
//
// Vectors are 0 beyond their prefix, so the bits of a prefix do not depend on later rows. No
// atomics and fixed orders: deterministic.
#include "attention/kernels/sinkhorn/gpu_params.h"
#include "attention/kernels/sinkhorn/gpu_small_prefix_panel.cuh"

namespace birkhoff::small_prefix {
namespace {

__global__ void __launch_bounds__(kThreads) exponentials_kernel(const BalanceParams p) {
  const Scratch scratch(p);
  const int tiles = p.num_tiles(), width = scratch.width, side = (p.rows + kTile - 1) / kTile;
  const std::int64_t matrix = blockIdx.x / tiles;
  const int tile = static_cast<int>(blockIdx.x % tiles);
  const int r0 = tile / side * kTile, c0 = tile % side * kTile;
  const int warp = warp_number(), lane = lane_number();
  float* transposed = reinterpret_cast<float*>(balance_memory);  // [kTile, kTile + 1]
  visit_exponentials(p, matrix, r0, c0, transposed + kTile * (kTile + 1),
                     scratch.limits[blockIdx.x], [&](int row, int column, float e) {
                       const int r = r0 + row, c = c0 + column;
                       transposed[column * (kTile + 1) + row] = e;
                       if (r < width && c < width) scratch.e[(matrix * width + r) * width + c] = e;
                     });
  for (int column = warp; column < kTile; column += kWarps) {
    const int r = r0 + lane, c = c0 + column;
    if (r < width && c < width) {
      scratch.e_t[(matrix * width + c) * width + r] = transposed[column * (kTile + 1) + lane];
    }
  }
}

// Each thread owns kSide^2 elements of the tile.
__global__ void __launch_bounds__(kThreads, 2) prefix_scores_kernel(const BalanceBackwardParams p) {
  constexpr int kSide = 4, kSize = kTile, kParts = 4;  // groups of 64 threads
  constexpr int kPairs = 32;                           // pairs (u, i) at a time
  const BalanceParams& forward = p.problems;
  const Scratch scratch(forward);
  const int N = forward.rows, width = scratch.width, I = forward.iterations;
  const int side = (N + kSize - 1) / kSize, thread = static_cast<int>(threadIdx.x);
  // The first tiles of a matrix take longest, so the first tiles of all matrices come first.
  const std::int64_t matrix = blockIdx.x % forward.matrices;
  const int tile = static_cast<int>(blockIdx.x / forward.matrices);
  const int r0 = tile / side * kSize, c0 = tile % side * kSize;
  const std::int64_t problems = matrix * forward.results;
  const float* in_log_domain = scratch.in_log_domain + problems;

  float* left = reinterpret_cast<float*>(balance_memory);  // [2 kPairs, kSize]: a and x
  float* right = left + 2 * kPairs * kSize;                // likewise: y and b
  const int part = thread / 64, row = thread % 64 / 8 * 4, column = thread % 8 * 4;
  float sum[kSide][kSide] = {};
  // The first prefix that holds an entry is u = max(r, c + 1).
  const int first = max(max(r0, c0 + 1) - forward.first_row, 0);
  const int num_pairs = (forward.results - first) * I;
  for (int pair = 0; pair < num_pairs; pair += kPairs) {
    for (int j = thread; j < 4 * kPairs * (kSize / 4); j += kThreads) {
      const int offset = j % (kSize / 4) * 4, vector = j / (kSize / 4) % 4;
      const int place = j / kSize;  // of the pair
      const int result = first + (pair + place) / I, i = (pair + place) % I;
      const bool is_left = vector < 2;
      const int begin = (is_left ? r0 : c0) + offset;
      float4 x = {0, 0, 0, 0};
      if (pair + place < num_pairs && begin < width && in_log_domain[result] == 0) {
        const Vectors vectors(p, problems + result);
        const float* from = vector == 0   ? vectors.f(i)
                            : vector == 1 ? vectors.x(i)
                            : vector == 2 ? vectors.y(i)
                                          : vectors.g(i);
        x = *reinterpret_cast<const float4*>(from + begin);
      }
      float* to = (is_left ? left : right) + (2 * place + vector % 2) * kSize + offset;
      *reinterpret_cast<float4*>(to) = x;
    }
    __syncthreads();
#pragma unroll 2
    for (int d = part; d < 2 * kPairs; d += kParts) {
      const float4 l4 = *reinterpret_cast<const float4*>(left + d * kSize + row);
      const float4 r4 = *reinterpret_cast<const float4*>(right + d * kSize + column);
      const float l[kSide] = {l4.x, l4.y, l4.z, l4.w}, r[kSide] = {r4.x, r4.y, r4.z, r4.w};
#pragma unroll
      for (int m = 0; m < kSide; ++m) {
#pragma unroll
        for (int n = 0; n < kSide; ++n) sum[m][n] += l[m] * r[n];
      }
    }
    __syncthreads();
  }

  const bool any_failed = any_in_log_domain(in_log_domain, forward.results, right);
  // Adds the sums of the parts, in their order, then takes whole rows of the tile at a time.
  float* flow = left;  // [kSize, kSize]
  for (int turn = 0; turn < kParts; ++turn) {
    if (part == turn) {
#pragma unroll
      for (int m = 0; m < kSide; ++m) {
#pragma unroll
        for (int n = 0; n < kSide; ++n) {
          float& to = flow[(row + m) * kSize + column + n];
          to = turn == 0 ? sum[m][n] : to + sum[m][n];
        }
      }
    }
    __syncthreads();
  }
  write_d_scores<Panel, kSize>(p, matrix, r0, c0, flow, any_failed);
}

}  // namespace

void launch_prefix_balance(const BalanceParams& params, cudaStream_t stream) {
  if (params.results == 0) return;
  launch_exponentials(&exponentials_kernel, params, stream);
  launch_panels<Panel>(&prefix_forward_kernel<Panel>, params, params, stream);
}

void launch_prefix_balance_backward(const BalanceBackwardParams& params, cudaStream_t stream) {
  const BalanceParams& problems = params.problems;
  launch_exponentials(&exponentials_kernel, problems, stream);
  launch_vectors<Panel>(params, stream);
  launch_blocks(&prefix_scores_kernel, problems.matrices * problems.num_tiles(), params,
                sizeof(float) * 4 * 32 * kTile, stream);
}

}  // namespace birkhoff::small_prefix
