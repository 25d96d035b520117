// The Sinkhorn operator for all prefixes of a matrix (attention/kernels/sinkhorn/sinkhorn.h,
// prefix_balance): forward and backward. Legend: r destination and c source of N, u prefix, i
// iteration of I, E = exp(S) and 0 where S is -inf. In all that belongs to prefix u, 1 <= r <= u
// and c < u: row 0 of E is 0.
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
// N <= 256, fp32. The kernels run one after another:
//
// exponentials: a block of 256 threads writes a 32 x 32 tile of E and of its transpose, and the
//   first prefix that holds a score too far from 0 (range.h). There is no shift, so none can depend
//   on later scores.
// forward, vectors: a block of 256 threads owns a panel of K successive prefixes of a matrix (K is
//   16 or, for N > 128, 32), so a step is the product of its [K, N] scalings and E or its
//   transpose. A warp owns 16 prefixes x 64 columns, a thread 8 x 4 of them. Where that is too
//   little work for 8 warps (N <= 128), 8 or 4 warps share the terms, and their sums are added up
//   in a fixed order. Scalings and sums are in shared memory, 39 to 65 KiB. Each step reads E once,
//   from L1 where it fits (N <= 128), otherwise from L2.
//   Prefixes whose scores or sums leave the number range are solved again, one by one, in the log
//   domain (gpu_log_domain.cuh): in the forward pass by the same block, in the backward pass by a
//   separate kernel, log_domain. Nothing waits for the host.
// scores: a block of 256 threads owns a tile of dS, T x T with T = 32 or, for N > 64, 64. The tile
//   is a matrix product over all (u, i), of which each group of 64 threads takes a quarter. Shared
//   memory: 16 or 32 KiB.
//
// Vectors are 0 beyond their prefix, so the bits of a prefix do not depend on what follows it. No
// atomics and fixed orders: deterministic.
#include "attention/kernels/sinkhorn/gpu_params.h"
#include "attention/kernels/sinkhorn/gpu_prefix_panel.cuh"

namespace birkhoff {
namespace {

__global__ void __launch_bounds__(kThreads) exponentials_kernel(const BalanceParams p) {
  const Scratch scratch(p);
  const int N = p.rows, width = scratch.width, side = (N + kTile - 1) / kTile;
  const std::int64_t matrix = blockIdx.x / scratch.tiles;
  const int tile = static_cast<int>(blockIdx.x % scratch.tiles);
  const int r0 = tile / side * kTile, c0 = tile % side * kTile;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  float* transposed = reinterpret_cast<float*>(balance_memory);  // [kTile, kTile + 1]
  float* least = transposed + kTile * (kTile + 1);               // [kWarps]
  float limit = static_cast<float>(N);
  for (int row = warp; row < kTile; row += kWarps) {
    const int r = r0 + row, c = c0 + lane;
    const float s = r > 0 && r < N && c < N ? p.scores[(matrix * N + r) * N + c] : -INFINITY;
    const bool in_range = fabsf(s) <= DeviceBalanceRange::kSpread;
    // The first prefix that holds the entry is u = max(r, c + 1).
    if (!in_range && s != -INFINITY) limit = fminf(limit, static_cast<float>(max(r, c + 1)));
    const float e = in_range ? expf(s) : 0.0f;
    transposed[lane * (kTile + 1) + row] = e;
    if (r < width && c < width) scratch.e[(matrix * width + r) * width + c] = e;
  }
  limit = -warp_max(-limit);
  if (lane == 0) least[warp] = limit;
  __syncthreads();
  for (int column = warp; column < kTile; column += kWarps) {
    const int r = r0 + lane, c = c0 + column;
    if (r < width && c < width) {
      scratch.e_t[(matrix * width + c) * width + r] = transposed[column * (kTile + 1) + lane];
    }
  }
  if (threadIdx.x == 0) {
    for (int w = 1; w < kWarps; ++w) limit = fminf(limit, least[w]);
    scratch.limits[matrix * scratch.tiles + tile] = limit;
  }
}

template <int kGroups>
__global__ void __launch_bounds__(kThreads, 2) prefix_forward_kernel(const BalanceParams p) {
  const Panel<kGroups> panel(p);
  const int N = p.rows;
  const auto nothing = [](int, int, int, const float(&)[4]) {};
  panel.solve(p.iterations, nothing, nothing, [&](int k, int u, float total) {
    const float* e = panel.e + u * panel.width;
    const float* b = panel.result(k);
    float* out = p.p + (std::int64_t{panel.matrix} * p.results + u - p.first_row) * N;
    for (int c = panel.lane; c < N; c += kWarp) out[c] = c < u ? e[c] * b[c] / total : 0.0f;
  });
  for (int k = 0; k < panel.kPrefixes && panel.first_prefix + k < N; ++k) {
    if (panel.failed()[k] == 0) continue;
    const LogDomain<kGroups> problem(p, panel.matrix, panel.first_prefix + k - p.first_row,
                                     panel.panel());
    problem.write_p(p.iterations, p.p);
    __syncthreads();
  }
}

// For solved prefixes, f of Vectors is a_ui and g is b_ui. Row u of d_scores becomes d.
template <int kGroups>
__global__ void __launch_bounds__(kThreads, 2)
    prefix_vectors_kernel(const BalanceBackwardParams p) {
  const BalanceParams& forward = p.problems;
  const Panel<kGroups> panel(forward);
  const int N = forward.rows, I = forward.iterations;
  const int first_problem = panel.matrix * forward.results + panel.first_prefix - forward.first_row;
  const auto write = [](float* vector, int j, const float(&x)[4]) {
    *reinterpret_cast<float4*>(vector + j) = {x[0], x[1], x[2], x[3]};
  };
  // x = -factors^2 x; the square itself could leave the number range.
  const auto flow_back = [](const float* factors, int j, float(&x)[4]) {
    const float4 f = *reinterpret_cast<const float4*>(factors + j);
    x[0] = -(x[0] * f.x) * f.x;
    x[1] = -(x[1] * f.y) * f.y;
    x[2] = -(x[2] * f.z) * f.z;
    x[3] = -(x[3] * f.w) * f.w;
  };

  panel.for_own([&](int k, int j) {
    const int u = panel.first_prefix + k;
    const float ones[4] = {j <= u ? 1.0f : 0.0f, j + 1 <= u ? 1.0f : 0.0f, j + 2 <= u ? 1.0f : 0.0f,
                           j + 3 <= u ? 1.0f : 0.0f};
    write(Vectors(p, first_problem + k).f(0), j, ones);
  });
  panel.solve(
      I,
      [&](int i, int k, int j, const float(&x)[4]) {
        write(Vectors(p, first_problem + k).f(i), j, x);
      },
      [&](int i, int k, int j, const float(&x)[4]) {
        write(Vectors(p, first_problem + k).g(i), j, x);
      },
      [&](int k, int u, float total) {
        const float* e = panel.e + u * panel.width;
        float* b = panel.result(k);
        const float* d_p = p.d_p + std::int64_t{first_problem + k} * N;
        float* d_scores = p.d_scores + (std::int64_t{panel.matrix} * N + u) * N;
        float sum = 0;
        for (int c = panel.lane; c < u; c += kWarp) sum += e[c] * b[c] / total * d_p[c];
        sum = warp_sum(sum);
        for (int c = panel.lane; c < u; c += kWarp) {
          const float d = e[c] * b[c] / total * (d_p[c] - sum);
          d_scores[c] = d;
          b[c] *= d;  // y
        }
      });
  panel.for_own([&](int k, int j) {
    const float* y = panel.result(k) + j;
    const float four[4] = {y[0], y[1], y[2], y[3]};
    const float zeros[4] = {};
    write(Vectors(p, first_problem + k).y(I - 1), j, four);
    write(Vectors(p, first_problem + k).x(I - 1), j, zeros);
    panel.store(k, j, four);
  });
  __syncthreads();
  for (int i = I - 2; i >= 0; --i) {
    panel.template step<false>(panel.e_t, [&](int k, int j, float(&x)[4]) {
      const Vectors vectors(p, first_problem + k);
      flow_back(vectors.f(i + 1), j, x);
      write(vectors.x(i), j, x);
    });
    panel.template step<true>(panel.e, [&](int k, int j, float(&y)[4]) {
      const Vectors vectors(p, first_problem + k);
      flow_back(vectors.g(i), j, y);
      write(vectors.y(i), j, y);
    });
  }
  float* in_log_domain = Scratch(forward).in_log_domain + first_problem;
  for (int k = static_cast<int>(threadIdx.x); k < panel.kPrefixes; k += kThreads) {
    if (panel.first_prefix + k < N) in_log_domain[k] = panel.failed()[k];
  }
}

// Solves the prefixes that prefix_vectors_kernel has not solved, kPrefixTile per block. One kernel
// for both would not have enough registers.
template <int kGroups>
__global__ void __launch_bounds__(kThreads, 1)
    prefix_log_domain_kernel(const BalanceBackwardParams p) {
  const BalanceParams& forward = p.problems;
  const int first = static_cast<int>(blockIdx.x / forward.matrices) * kPrefixTile;
  const std::int64_t matrix = blockIdx.x % forward.matrices;
  const float* in_log_domain = Scratch(forward).in_log_domain + matrix * forward.results;
  for (int result = first; result < min(first + kPrefixTile, forward.results); ++result) {
    if (in_log_domain[result] == 0) continue;
    const LogDomain<kGroups> problem(forward, matrix, result,
                                     reinterpret_cast<float*>(balance_memory));
    problem.write_vectors(forward.iterations, p.d_p, Vectors(p, matrix * forward.results + result),
                          p.d_scores + matrix * forward.rows * forward.columns);
    __syncthreads();
  }
}

// Each thread owns kSide^2 numbers of the tile, in groups of 4 x 4.
template <int kSide>
__global__ void __launch_bounds__(kThreads, 2) prefix_scores_kernel(const BalanceBackwardParams p) {
  constexpr int kSize = 8 * kSide, kParts = 4;  // of the tile; groups of 64 threads
  constexpr int kPairs = 32;                    // pairs (u, i) at a time
  const BalanceParams& forward = p.problems;
  const Scratch scratch(forward);
  const int N = forward.rows, width = scratch.width, I = forward.iterations;
  const int side = (N + kSize - 1) / kSize, thread = static_cast<int>(threadIdx.x);
  // The first tiles of a matrix take longest, so those of all matrices come first.
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
      float l[kSide], r[kSide];
#pragma unroll
      for (int n = 0; n < kSide; n += 4) {
        const float4 l4 = *reinterpret_cast<const float4*>(left + d * kSize + row + n * 8);
        const float4 r4 = *reinterpret_cast<const float4*>(right + d * kSize + column + n * 8);
        l[n] = l4.x, l[n + 1] = l4.y, l[n + 2] = l4.z, l[n + 3] = l4.w;
        r[n] = r4.x, r[n + 1] = r4.y, r[n + 2] = r4.z, r[n + 3] = r4.w;
      }
#pragma unroll
      for (int m = 0; m < kSide; ++m) {
#pragma unroll
        for (int n = 0; n < kSide; ++n) sum[m][n] += l[m] * r[n];
      }
    }
    __syncthreads();
  }

  // Adds the sums of the parts, in their order, then takes whole rows of the tile at a time.
  float* flow = left;  // [kSize, kSize]
  float& any_in_log_domain = right[0];
  if (thread == 0) any_in_log_domain = 0;
  __syncthreads();
  if (thread < forward.results && in_log_domain[thread] != 0) any_in_log_domain = 1;
  for (int turn = 0; turn < kParts; ++turn) {
    if (part == turn) {
#pragma unroll
      for (int m = 0; m < kSide; ++m) {
#pragma unroll
        for (int n = 0; n < kSide; ++n) {
          float& to = flow[(row + m / 4 * 32 + m % 4) * kSize + column + n / 4 * 32 + n % 4];
          to = turn == 0 ? sum[m][n] : to + sum[m][n];
        }
      }
    }
    __syncthreads();
  }
  for (int j = thread; j < kSize * kSize; j += kThreads) {
    const int r = r0 + j / kSize, c = c0 + j % kSize;
    if (r >= N || c >= N) continue;
    const std::int64_t entry = (matrix * N + r) * N + c;
    const float s = r > 0 ? forward.scores[entry] : -INFINITY;
    float d = r >= forward.first_row && c < r ? p.d_scores[entry] : 0.0f;
    d -= scratch.e[(matrix * width + r) * width + c] * flow[j];
    int result = max(max(r, c + 1) - forward.first_row, 0);
    if (any_in_log_domain == 0) result = forward.results;
    for (; result < forward.results; ++result) {
      if (in_log_domain[result] == 0) continue;
      d -= log_domain_share(Vectors(p, problems + result), I, r, c, s);
    }
    p.d_scores[entry] = s == -INFINITY ? 0.0f : d;
  }
}

template <typename Params>
void launch_blocks(void (*kernel)(Params), std::int64_t blocks, const Params& params,
                   std::size_t shared_bytes, cudaStream_t stream) {
  launch({.grid = dim3(static_cast<unsigned>(blocks)),
          .block = dim3(kThreads),
          .stream = stream,
          .shared_bytes = shared_bytes},
         kernel, params);
}

// As launch_blocks, for panels, which may need more shared memory than a kernel gets by default.
template <int kGroups, typename Params>
void launch_panels(void (*kernel)(Params), const BalanceParams& p, const Params& params,
                   cudaStream_t stream) {
  const std::size_t shared_bytes = Panel<kGroups>::shared_bytes(p.rows);
  cuda_check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                  cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(shared_bytes)),
             "cudaFuncSetAttribute");
  launch_blocks(kernel, p.matrices * Panel<kGroups>::num_panels(p.results), params, shared_bytes,
                stream);
}

// Calls use<kGroups>().
template <typename Use>
void with_groups(int size, Use use) {
  if (size <= 64) return use.template operator()<2>();
  if (size <= 128) return use.template operator()<4>();
  use.template operator()<8>();
}

void launch_exponentials(const BalanceParams& p, cudaStream_t stream) {
  launch_blocks(&exponentials_kernel, p.matrices * p.num_tiles(), p,
                sizeof(float) * (kTile * (kTile + 1) + kWarps), stream);
}

template <int kSide>
void launch_scores(const BalanceBackwardParams& params, cudaStream_t stream) {
  constexpr int kSize = 8 * kSide;
  const int side = (params.problems.rows + kSize - 1) / kSize;
  launch_blocks(&prefix_scores_kernel<kSide>, params.problems.matrices * side * side, params,
                sizeof(float) * 4 * 32 * kSize, stream);
}

}  // namespace

void launch_prefix_balance(const BalanceParams& params, cudaStream_t stream) {
  if (params.results == 0) return;
  launch_exponentials(params, stream);
  with_groups(params.rows, [&]<int kGroups>() {
    launch_panels<kGroups>(&prefix_forward_kernel<kGroups>, params, params, stream);
  });
}

void launch_prefix_balance_backward(const BalanceBackwardParams& params, cudaStream_t stream) {
  const BalanceParams& problems = params.problems;
  launch_exponentials(problems, stream);
  if (problems.results > 0) {
    with_groups(problems.rows, [&]<int kGroups>() {
      launch_panels<kGroups>(&prefix_vectors_kernel<kGroups>, problems, params, stream);
      launch_blocks(&prefix_log_domain_kernel<kGroups>,
                    problems.matrices * ((problems.results + kPrefixTile - 1) / kPrefixTile),
                    params, LogDomain<kGroups>::shared_bytes(problems.rows, problems.columns),
                    stream);
    });
  }
  if (problems.rows <= 64) return launch_scores<4>(params, stream);
  launch_scores<8>(params, stream);
}

}  // namespace birkhoff
