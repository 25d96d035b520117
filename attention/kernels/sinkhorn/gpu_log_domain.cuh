// The Sinkhorn operator in the log domain, for scores of any range: how a block solves one problem.
// gpu_launch.cu has the formulas. Its kernels use this code, and gpu_prefix.cu's do for prefixes
// that leave their number range. Legend: r destination of R, c source of C, i iteration of I.
//
// A problem is a matrix [R, C] or, of prefixes, its leading u + 1 rows and u columns, where row 0
// counts as masked and row u is the result. Warp w owns rows w, w + W, .. and lane l owns columns
// l, l + 32, .. of a row. A row step and the next column step are one pass: the row that has just
// been normalized is at hand when the columns are summed, so an entry costs one exponential per
// iteration, and row sums need no shared memory. Every column step but the first sums entries of
// rows that sum to 1: its sum is between 1 / C and R, and it updates g without a maximum. No
// atomics: deterministic.
#pragma once

#include <cmath>
#include <cstdint>

#include "attention/kernels/sinkhorn/gpu_params.h"
#include "cluster/base/gpu/launch.h"
#include "cluster/base/gpu/warp.cuh"

namespace birkhoff {
namespace {

extern __shared__ float4 balance_memory[];  // float4 for its alignment

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

// The vectors that the backward pass keeps for one problem, padded to whole float4. i counts from
// 0.
struct Vectors {
  int rows, columns;
  float* data;

  __device__ Vectors(const BalanceBackwardParams& p, std::int64_t problem)
      : rows(BalanceParams::padded(p.problems.rows)),
        columns(BalanceParams::padded(p.problems.columns)),
        data(p.vectors + problem * p.problems.iterations * 2 * (rows + columns)) {}

  __device__ float* f(int i) const { return data + i * 2 * (rows + columns); }
  __device__ float* g(int i) const { return f(i) + rows; }
  __device__ float* x(int i) const { return g(i) + columns; }
  __device__ float* y(int i) const { return x(i) + rows; }
};

// One problem, as its block of kWarps warps sees it. kGroups: columns per lane.
template <int kGroups, int kWarps, bool kShared>
struct LogDomainProblem {
  static constexpr int kThreads = kWarps * kWarp;

  int rows, columns;           // of this problem
  int stride;                  // of rows of s
  const float* s;              // scores, in shared memory with kShared
  float *g, *partial;          // shared: [columns], [kWarps, columns]
  int first;                   // row of the result
  int first_taking_part;       // rows before it count as masked
  int result_columns;          // of a row of the result; columns beyond `columns` are 0
  std::int64_t result_offset;  // of the result in P
  int warp, lane;

  // `memory`: shared_bytes() bytes of shared memory.
  __device__ LogDomainProblem(const BalanceParams& p, std::int64_t matrix, int result,
                              float* memory)
      : rows(p.prefix() ? p.first_row + result + 1 : p.rows),
        columns(p.prefix() ? p.first_row + result : p.columns),
        stride(kShared ? columns : p.columns),
        s(p.scores + matrix * p.rows * p.columns),
        g(memory),
        partial(g + columns),
        first(p.prefix() ? rows - 1 : 0),
        first_taking_part(p.prefix() ? 1 : 0),
        result_columns(p.columns),
        result_offset((matrix * p.results * (rows - first) + result) * p.columns),
        warp(warp_number()),
        lane(lane_number()) {
    if constexpr (kShared) {
      float* copy = partial + kWarps * columns;
      for (int r = warp; r < rows; r += kWarps) {
        for (int c = lane; c < columns; c += kWarp) copy[r * columns + c] = s[r * p.columns + c];
      }
      s = copy;  // no barrier: a warp reads only rows that it wrote
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
    if (r >= first_taking_part) return;
#pragma unroll
    for (int k = 0; k < kGroups; ++k) x[k] = -INFINITY;
  }

  // Adds up the warps' sums (or combines their maxima) of each column in the order of the warps,
  // and calls use(c, total) in one thread per column. All threads of the block call this; when it
  // returns, they see what `use` wrote.
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
    sum_columns(sum, [&](int c, float total) { g[c] = total == 0 ? 0.0f : -(g[c] + logf(total)); });
  }

  // The row step of row r. Returns f, which is 0 for a row without a finite score and the same in
  // all lanes, and sets x to this lane's columns of exp(S + f + g).
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
    if (sum == 0) return 0;
    const float scale = 1 / sum;
#pragma unroll
    for (int k = 0; k < kGroups; ++k) x[k] *= scale;
    return -(most + logf(sum));
  }

  // Runs all iterations. All threads call each_column_step(i) after each column step, with its g in
  // place. The warp that made a row step calls each_row_step(i, r, f, x) after it. The last
  // iteration computes only the rows from last_iteration_row on.
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
        if (total != 0) g[c] -= logf(total);
      });
    }
  }

  // Writes P of the result into p [matrices, rows of all results, columns].
  __device__ void write_p(int iterations, float* p) const {
    solve(
        iterations, first, [](int) {},
        [&](int i, int r, float, const float(&x)[kGroups]) {
          if (i + 1 < iterations) return;
          float* row = p + result_offset + (r - first) * result_columns;
#pragma unroll
          for (int k = 0; k < kGroups; ++k) {
            const int c = lane + k * kWarp;
            if (c < columns) row[c] = x[k];
          }
          for (int c = columns + lane; c < result_columns; c += kWarp) row[c] = 0;
        });
  }

  // Writes f, g, x and y of each iteration to `vectors`, and P (d - x_I) of the result's rows to
  // d_scores [rows of the matrix, its columns]. The x_I written is 0. d_p has the shape of p in
  // write_p.
  __device__ void write_vectors(int iterations, const float* d_p, const Vectors& vectors,
                                float* d_scores) const {
    const int I = iterations;
    solve(
        I, 0,
        [&](int i) {
          for (int c = static_cast<int>(threadIdx.x); c < columns; c += kThreads) {
            vectors.g(i)[c] = g[c];
          }
        },
        [&](int i, int r, float f, const float(&)[kGroups]) {
          if (lane == 0) vectors.f(i)[r] = f;
        });
    __syncthreads();  // f and g of all rows and columns are read below

    // x and y of the last iteration, from the rows of the result.
    float sum[kGroups] = {}, w[kGroups], columns_g[kGroups], y[kGroups], ratio[kGroups];
    load(vectors.g(I - 1), 0, columns_g);
    for (int r = warp; r < rows; r += kWarps) {
      if (r >= first) {
        float x = 0;
        load_row(r, w);
        load(d_p + result_offset + (r - first) * result_columns, 0, y);
        const float f = vectors.f(I - 1)[r];
#pragma unroll
        for (int k = 0; k < kGroups; ++k) {
          w[k] = expf(w[k] + f + columns_g[k]);
          x += w[k] * y[k];
        }
        x = warp_sum(x);
#pragma unroll
        for (int k = 0; k < kGroups; ++k) {
          const float d = w[k] * (y[k] - x);
          const int c = lane + k * kWarp;
          if (c < columns) d_scores[r * result_columns + c] = d;
          sum[k] += d;
        }
      }
      if (lane == 0) vectors.x(I - 1)[r] = 0;  // its share is already in d
    }
    sum_columns(sum, [&](int c, float total) { vectors.y(I - 1)[c] = total; });

    for (int i = I - 1; i > 0; --i) {
      load(vectors.y(i), 0, y);
      load(vectors.g(i), 0, columns_g);
      load(vectors.g(i - 1), 0, ratio);  // W_{i-1} = V_i ratio
#pragma unroll
      for (int k = 0; k < kGroups; ++k) {
        ratio[k] = expf(ratio[k] - columns_g[k]);
        sum[k] = 0;
      }
      for (int r = warp; r < rows; r += kWarps) {
        load_row(r, w);
        const float f = vectors.f(i - 1)[r];
        float x = 0;
#pragma unroll
        for (int k = 0; k < kGroups; ++k) {
          w[k] = expf(w[k] + f + columns_g[k]);
          x -= w[k] * y[k];
        }
        x = warp_sum(x);
#pragma unroll
        for (int k = 0; k < kGroups; ++k) sum[k] -= x * w[k] * ratio[k];
        if (lane == 0) vectors.x(i - 1)[r] = x;
      }
      sum_columns(sum, [&](int c, float total) { vectors.y(i - 1)[c] = total; });
    }
  }
};

// The amount that the steps of one problem subtract from dS[r, c]:
// sum_i (x_i[r] W_i[r, c] + y_i[c] V_i[r, c]), with the x and y of write_vectors, for a score s
// that is not masked.
__device__ inline float log_domain_share(const Vectors& vectors, int iterations, int r, int c,
                                         float s) {
  float f_before = 0, share = 0;
  for (int i = 0; i < iterations; ++i) {
    const float f = vectors.f(i)[r], g = vectors.g(i)[c];
    // Added up as in write_vectors, whose shares of a sum cancel these.
    share += vectors.x(i)[r] * expf(s + f + g) + vectors.y(i)[c] * expf(s + f_before + g);
    f_before = f;
  }
  return share;
}

// Completes entry `entry` [R, C] of the dS that write_vectors began. `first`: of the matrix, in
// scores and d_scores.
__device__ inline void subtract_log_domain_share(const BalanceBackwardParams& p,
                                                 const Vectors& vectors, std::int64_t first,
                                                 int entry) {
  const BalanceParams& problems = p.problems;
  const float s = problems.scores[first + entry];
  float& d = p.d_scores[first + entry];
  d = s == -INFINITY ? 0.0f
                     : d - log_domain_share(vectors, problems.iterations, entry / problems.columns,
                                            entry % problems.columns, s);
}

}  // namespace
}  // namespace birkhoff
