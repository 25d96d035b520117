// The Sinkhorn operator (attention/balance.h; Tay et al. 2020, section 3.1.1) forward and backward,
// whole matrices or prefixes of them. Legend: r destination of R, c source of C, i iteration of I.
//
//   g_i[c] = -log sum_r exp(S[r, c] + f_{i-1}[r])    f_0 = 0
//   f_i[r] = -log sum_c exp(S[r, c] + g_i[c])        P[r, c] = exp(S[r, c] + f_I[r] + g_I[c])
//
// Backward, with d = dLoss/dP, W_i = exp(S + f_i + g_i) and V_i = exp(S + f_{i-1} + g_i):
//
//   x_I[r] = sum_c (P d)[r, c]          x_{i-1}[r] = -sum_c V_i[r, c] y_i[c]
//   y_I[c] = sum_r (P d - x_I W_I)[r, c]    y_{i-1}[c] = -sum_r (x_{i-1} W_{i-1})[r, c]
//   dS[r, c] = (P d)[r, c] - sum_i (x_i[r] W_i[r, c] + y_i[c] V_i[r, c])
//
// A problem is a matrix [R, C], or its leading u + 1 rows and u columns, of which row 0 counts as
// barred and row u is the result (`prefix`): R, C <= 256. fp32. A block of 128, 256 or 512 threads (C <= 64, 128, 256) owns one
// problem; warp w owns rows w, w + W, .. and lane l the columns l, l + 32, .. of a row. A row step
// and the column step behind it are one pass: a row that has been normalised is at hand when
// columns are summed, so an entry costs one exponential an iteration, and row sums take no shared
// memory. After its first, a column step adds up entries of rows that sum to 1: its sum is between
// 1 / C and R and updates g without a maximum. Scores are read once, into shared memory where R C
// numbers fit (R = C <= 232 on sm_90, 195 on sm_80), else from L2 in each pass; P is written once.
// Backward: the block makes f and g again, then x and y, and leaves the four vectors of each
// iteration in memory; a second kernel with a thread for each entry adds up dS over the problems
// that hold the entry, in their order. No atomics: deterministic.
#include <algorithm>
#include <cmath>

#include "attention/balance_params.h"
#include "cluster/base/cuda/launch.h"

namespace birkhoff {
namespace {

constexpr unsigned kWholeWarp = 0xffffffff;
constexpr int kWarp = 32;
constexpr int kScoresThreads = 256;

extern __shared__ float balance_memory[];

__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(kWholeWarp, x, distance);
  }
  return x;
}

__device__ inline float warp_max(float x) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    x = fmaxf(x, __shfl_xor_sync(kWholeWarp, x, distance));
  }
  return x;
}

// What the backward pass keeps of one problem, with i from 0.
struct Vectors {
  float* data;
  int rows, columns;

  __host__ __device__ float* f(int i) const { return data + i * 2 * (rows + columns); }
  __host__ __device__ float* g(int i) const { return f(i) + rows; }
  __host__ __device__ float* x(int i) const { return g(i) + columns; }
  __host__ __device__ float* y(int i) const { return x(i) + rows; }
};

__host__ __device__ inline std::int64_t vectors_per_problem(const BalanceParams& p) {
  return std::int64_t{p.iterations} * 2 * (p.rows + p.columns);
}

// One problem as its block sees it. kGroups: columns of a lane.
template <int kGroups, bool kShared>
struct Problem {
  static constexpr int kThreads = 64 * kGroups, kWarps = kThreads / kWarp;

  int rows, columns;   // of this problem
  int first;           // rows before it have no finite score
  int stride;          // of rows of s
  const float* s;      // scores, in shared memory with kShared
  float *g, *partial;  // shared: [columns], [kWarps, columns]
  int warp, lane;

  __device__ Problem(const BalanceParams& p, std::int64_t matrix, int result)
      : rows(p.prefix ? p.first_row + result + 1 : p.rows),
        columns(p.prefix ? p.first_row + result : p.columns),
        first(p.prefix ? 1 : 0),
        stride(kShared ? columns : p.columns),
        s(p.scores + matrix * p.rows * p.columns),
        g(balance_memory),
        partial(g + columns),
        warp(static_cast<int>(threadIdx.x) / kWarp),
        lane(static_cast<int>(threadIdx.x) % kWarp) {
    if constexpr (kShared) {
      float* copy = partial + kWarps * columns;
      for (int r = warp; r < rows; r += kWarps) {
        for (int c = lane; c < columns; c += kWarp) copy[r * columns + c] = s[r * p.columns + c];
      }
      s = copy;  // a warp reads the rows that it wrote
    }
  }

  static std::size_t shared_bytes(int rows, int columns) {
    return sizeof(float) * static_cast<std::size_t>((1 + kWarps + (kShared ? rows : 0)) * columns);
  }

  // x[k] = from[column k of this lane], `missing` beyond the last.
  __device__ void load(const float* from, float missing, float (&x)[kGroups]) const {
#pragma unroll
    for (int k = 0; k < kGroups; ++k) {
      const int c = lane + k * kWarp;
      x[k] = c < columns ? from[c] : missing;
    }
  }
  __device__ void load_row(int r, float (&x)[kGroups]) const {
    load(s + r * stride, -INFINITY, x);
    if (r >= first) return;
#pragma unroll
    for (int k = 0; k < kGroups; ++k) x[k] = -INFINITY;
  }

  // Calls use(c, total) in one thread for each column, with the warps' sums (or maxima) added up in
  // the warps' order. Called by all threads of the block; those behind it see what `use` wrote.
  template <typename Combine, typename Use>
  __device__ void combine_columns(const float (&mine)[kGroups], Combine combine, Use use) const {
#pragma unroll
    for (int k = 0; k < kGroups; ++k) {
      const int c = lane + k * kWarp;
      if (c < columns) partial[warp * columns + c] = mine[k];
    }
    __syncthreads();
    for (int c = static_cast<int>(threadIdx.x); c < columns; c += kThreads) {
      float total = partial[c];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) total = combine(total, partial[w * columns + c]);
      use(c, total);
    }
    __syncthreads();
  }
  template <typename Use>
  __device__ void sum_columns(const float (&mine)[kGroups], Use use) const {
    combine_columns(
        mine, [](float a, float b) { return a + b; }, use);
  }

  // g of the first column step; 0 for a column without a finite score.
  __device__ void first_column_step() const {
    float most[kGroups], sum[kGroups] = {}, x[kGroups];
#pragma unroll
    for (int k = 0; k < kGroups; ++k) most[k] = -INFINITY;
    for (int r = warp; r < rows; r += kWarps) {
      load_row(r, x);
#pragma unroll
      for (int k = 0; k < kGroups; ++k) most[k] = fmaxf(most[k], x[k]);
    }
    combine_columns(
        most, [](float a, float b) { return fmaxf(a, b); },
        [&](int c, float total) { g[c] = total == -INFINITY ? 0.0f : total; });
    load(g, 0, most);
    for (int r = warp; r < rows; r += kWarps) {
      load_row(r, x);
#pragma unroll
      for (int k = 0; k < kGroups; ++k) sum[k] += expf(x[k] - most[k]);
    }
    sum_columns(sum, [&](int c, float total) { g[c] = total > 0 ? -(g[c] + logf(total)) : 0.0f; });
  }

  // The row step of row r: returns f, 0 for a row without a finite score, and sets x to the row of
  // exp(S + f + g). The same in all lanes but for x.
  __device__ float row_step(int r, const float (&columns_g)[kGroups], float (&x)[kGroups]) const {
    load_row(r, x);
    float most = -INFINITY, sum = 0;
#pragma unroll
    for (int k = 0; k < kGroups; ++k) {
      x[k] += columns_g[k];
      most = fmaxf(most, x[k]);
    }
    most = warp_max(most);
    if (most == -INFINITY) most = 0;
#pragma unroll
    for (int k = 0; k < kGroups; ++k) {
      x[k] = expf(x[k] - most);
      sum += x[k];
    }
    sum = warp_sum(sum);
    if (!(sum > 0)) return 0;
    const float scale = 1 / sum;
#pragma unroll
    for (int k = 0; k < kGroups; ++k) x[k] *= scale;
    return -(most + logf(sum));
  }

  // All iterations. each_column_step(i) follows each column step, in all threads, with its g in
  // place; each_row_step(i, r, f, x) each row step, in the warp that made it; of the last iteration
  // the rows from last_iteration_row on alone.
  template <typename ColumnStep, typename RowStep>
  __device__ void solve(int iterations, int last_iteration_row, ColumnStep each_column_step,
                        RowStep each_row_step) const {
    first_column_step();
    float columns_g[kGroups], x[kGroups];
    for (int i = 0; i < iterations; ++i) {
      const bool last = i + 1 == iterations;
      each_column_step(i);
      load(g, 0, columns_g);
      float sum[kGroups] = {};
      for (int r = warp; r < rows; r += kWarps) {
        if (last && r < last_iteration_row) continue;
        const float f = row_step(r, columns_g, x);
        each_row_step(i, r, f, x);
#pragma unroll
        for (int k = 0; k < kGroups; ++k) sum[k] += x[k];
      }
      if (last) return;
      sum_columns(sum, [&](int c, float total) {
        if (total > 0) g[c] -= logf(total);
      });
    }
  }
};

template <int kGroups, bool kShared>
__global__ void __launch_bounds__(64 * kGroups, 1) forward_kernel(const BalanceParams p) {
  const int results = p.results;
  const std::int64_t matrix = blockIdx.x / results;
  const int result = static_cast<int>(blockIdx.x % results);
  const Problem<kGroups, kShared> problem(p, matrix, result);
  // [rows of the result, columns]
  const int first = p.prefix ? problem.rows - 1 : 0, num_rows = p.prefix ? 1 : p.rows;
  float* out = p.p + (matrix * results * num_rows + result) * p.columns;
  problem.solve(
      p.iterations, first, [](int) {},
      [&](int i, int r, float, const float(&x)[kGroups]) {
        if (i + 1 < p.iterations) return;
        float* row = out + (r - first) * p.columns;
#pragma unroll
        for (int k = 0; k < kGroups; ++k) {
          const int c = problem.lane + k * kWarp;
          if (c < problem.columns) row[c] = x[k];
        }
        for (int c = problem.columns + problem.lane; c < p.columns; c += kWarp) row[c] = 0;
      });
}

template <int kGroups, bool kShared>
__global__ void __launch_bounds__(64 * kGroups, 1) vectors_kernel(const BalanceBackwardParams p) {
  const BalanceParams& forward = p.problems;
  const int results = forward.results, I = forward.iterations;
  const std::int64_t matrix = blockIdx.x / results;
  const int result = static_cast<int>(blockIdx.x % results);
  const Problem<kGroups, kShared> problem(forward, matrix, result);
  const int warp = problem.warp, lane = problem.lane, columns = problem.columns;
  constexpr int kWarps = Problem<kGroups, kShared>::kWarps;
  const Vectors vectors{p.vectors + std::int64_t{blockIdx.x} * vectors_per_problem(forward),
                        forward.rows, forward.columns};

  problem.solve(
      I, 0,
      [&](int i) {
        for (int c = static_cast<int>(threadIdx.x); c < columns; c += 64 * kGroups) {
          vectors.g(i)[c] = problem.g[c];
        }
      },
      [&](int i, int r, float f, const float(&)[kGroups]) {
        if (lane == 0) vectors.f(i)[r] = f;
      });
  __syncthreads();  // f and g of all rows and columns are read below

  // x and y of the last iteration, from the rows of the result.
  const int first = forward.prefix ? problem.rows - 1 : 0;
  const int num_rows = forward.prefix ? 1 : forward.rows;
  const float* d_p = p.d_p + (matrix * results * num_rows + result) * forward.columns;
  float sum[kGroups] = {}, s[kGroups], g[kGroups], y[kGroups], ratio[kGroups];
  problem.load(vectors.g(I - 1), 0, g);
  for (int r = warp; r < problem.rows; r += kWarps) {
    float x = 0;
    if (r >= first) {
      problem.load_row(r, s);
      problem.load(d_p + (r - first) * forward.columns, 0, y);
      const float f = vectors.f(I - 1)[r];
#pragma unroll
      for (int k = 0; k < kGroups; ++k) {
        s[k] = expf(s[k] + f + g[k]);
        y[k] *= s[k];
        x += y[k];
      }
      x = warp_sum(x);
#pragma unroll
      for (int k = 0; k < kGroups; ++k) sum[k] += y[k] - x * s[k];
    }
    if (lane == 0) vectors.x(I - 1)[r] = x;
  }
  problem.sum_columns(sum, [&](int c, float total) { vectors.y(I - 1)[c] = total; });

  for (int i = I - 1; i > 0; --i) {
    problem.load(vectors.y(i), 0, y);
    problem.load(vectors.g(i), 0, g);
    problem.load(vectors.g(i - 1), 0, ratio);  // W_{i-1} = V_i ratio
#pragma unroll
    for (int k = 0; k < kGroups; ++k) {
      ratio[k] = expf(ratio[k] - g[k]);
      sum[k] = 0;
    }
    for (int r = warp; r < problem.rows; r += kWarps) {
      problem.load_row(r, s);
      const float f = vectors.f(i - 1)[r];
      float x = 0;
#pragma unroll
      for (int k = 0; k < kGroups; ++k) {
        s[k] = expf(s[k] + f + g[k]);
        x -= s[k] * y[k];
      }
      x = warp_sum(x);
#pragma unroll
      for (int k = 0; k < kGroups; ++k) sum[k] -= x * s[k] * ratio[k];
      if (lane == 0) vectors.x(i - 1)[r] = x;
    }
    problem.sum_columns(sum, [&](int c, float total) { vectors.y(i - 1)[c] = total; });
  }
}

// A thread for each score.
__global__ void __launch_bounds__(kScoresThreads) scores_kernel(const BalanceBackwardParams p) {
  const BalanceParams& forward = p.problems;
  const std::int64_t entry = std::int64_t{blockIdx.x} * kScoresThreads + threadIdx.x;
  if (entry >= forward.matrices * forward.rows * forward.columns) return;
  const int c = static_cast<int>(entry % forward.columns);
  const int r = static_cast<int>(entry / forward.columns % forward.rows);
  const std::int64_t matrix = entry / forward.columns / forward.rows;
  const int results = forward.results, I = forward.iterations;
  const float s = forward.prefix && r == 0 ? -INFINITY : forward.scores[entry];

  float d = 0;
  // The first prefix that holds the entry is u = max(r, c + 1).
  const int first = forward.prefix ? max(max(r, c + 1) - forward.first_row, 0) : 0;
  for (int result = s == -INFINITY ? results : first; result < results; ++result) {
    const std::int64_t problem = matrix * results + result;
    const Vectors vectors{p.vectors + problem * vectors_per_problem(forward), forward.rows,
                          forward.columns};
    float f_before = 0, share = 0;
    for (int i = 0; i < I; ++i) {
      const float f = vectors.f(i)[r], s_g = s + vectors.g(i)[c];
      const float w = expf(s_g + f);
      share += vectors.x(i)[r] * w + vectors.y(i)[c] * expf(s_g + f_before);
      f_before = f;
      if (i + 1 < I) continue;
      if (!forward.prefix) {
        d += w * p.d_p[entry];
      } else if (r == forward.first_row + result) {
        d += w * p.d_p[problem * forward.columns + c];
      }
    }
    d -= share;
  }
  p.d_scores[entry] = d;
}

// Calls launch_kernel<columns of a lane, scores in shared memory?>(bytes of shared memory).
template <typename Launch>
void with_shape(const BalanceParams& p, Launch launch_kernel) {
  int device = 0, most_shared = 0;
  cuda_check(cudaGetDevice(&device), "cudaGetDevice");
  cuda_check(cudaDeviceGetAttribute(&most_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
             "cudaDeviceGetAttribute");
  const auto in_shared = [&]<int kGroups>() {
    launch_kernel.template operator()<kGroups, true>(
        Problem<kGroups, true>::shared_bytes(p.rows, p.columns));
  };
  if (p.columns <= 2 * kWarp) return in_shared.template operator()<2>();
  if (p.columns <= 4 * kWarp) return in_shared.template operator()<4>();
  if (Problem<8, true>::shared_bytes(p.rows, p.columns) <= static_cast<std::size_t>(most_shared)) {
    return in_shared.template operator()<8>();
  }
  launch_kernel.template operator()<8, false>(Problem<8, false>::shared_bytes(p.rows, p.columns));
}

template <int kGroups, typename Params>
void launch_problems(void (*kernel)(Params), const BalanceParams& problems, const Params& params,
                     std::size_t shared_bytes, cudaStream_t stream) {
  cuda_check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                  cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(shared_bytes)),
             "cudaFuncSetAttribute");
  launch({.grid = dim3(static_cast<unsigned>(problems.matrices * problems.results)),
          .block = dim3(64 * kGroups),
          .stream = stream,
          .shared_bytes = shared_bytes},
         kernel, params);
}

}  // namespace

void launch_balance(const BalanceParams& params, cudaStream_t stream) {
  if (params.matrices == 0 || params.results == 0) return;
  with_shape(params, [&]<int kGroups, bool kShared>(std::size_t shared_bytes) {
    launch_problems<kGroups>(&forward_kernel<kGroups, kShared>, params, params, shared_bytes,
                             stream);
  });
}

void launch_balance_backward(const BalanceBackwardParams& params, cudaStream_t stream) {
  const BalanceParams& problems = params.problems;
  const std::int64_t entries = problems.matrices * problems.rows * problems.columns;
  if (entries == 0) return;
  if (problems.results > 0) {
    with_shape(problems, [&]<int kGroups, bool kShared>(std::size_t shared_bytes) {
      launch_problems<kGroups>(&vectors_kernel<kGroups, kShared>, problems, params, shared_bytes,
                               stream);
    });
  }
  launch({.grid = dim3(static_cast<unsigned>((entries + kScoresThreads - 1) / kScoresThreads)),
          .block = dim3(kScoresThreads),
          .stream = stream},
         scores_kernel, params);
}

}  // namespace birkhoff
