// The cumulative balance (sinkhorn.h) forward and backward, in the log domain. Legend: u
// destination and v source of N, i iteration of I.
//
//   C_i[u, v] = log sum_{u' <= u} exp(S[u', v] + f_{i-1}[u'])    f_0 = 0
//   g_i = -C_i, 0 where C_i is -inf
//   f_i[u] = -log(1 + sum_v exp(S[u, v] + g_i[u, v]))            P = exp(S + f_I + g_I)
//
// Backward, with d = dLoss/dP, W_i = exp(S + f_i + g_i) and V_i = exp(S + f_{i-1} + g_i):
//
//   x_I[u] = sum_v (P d)[u, v],  x_{i-1}[u] = -sum_v (V_i r_i)[u, v]
//   r_i[u, v] = y_i[u, v] + exp(g_i[u + 1, v] - g_i[u, v]) r_i[u + 1, v]
//       with y_I = P (d - x_I), y_i = -x_i W_i, and the exponential at most 1 (log_domain.cpp)
//   dS = sum_i (y_i - V_i r_i)
//
// A block of threads owns a matrix, a warp an iteration, a lane every 32nd column. C_i of a row
// needs C_i of the row before it and f_{i-1} of the same row. So warps take rows one step apart:
// in step t the warp of iteration i has row t - i (counted from 0). Backward, from the last row up
// and from the last iteration, x comes in the same way. C of the row before, or r of the row after,
// stays in registers. The backward pass keeps C and f of all rows in memory; a row of dS is added
// up by one warp after the other. N <= 256, I <= 20, fp32. No atomics: deterministic.
#include <math.h>

#include "attention/kernels/sinkhorn/gpu_log_domain.cuh"
#include "attention/kernels/sinkhorn/gpu_params.h"

namespace birkhoff {
namespace {

constexpr int kMostThreads = BalanceParams::kMaxCumulativeIterations * kWarp;

// log(exp(x) + exp(y)).
__device__ inline float log_add(float x, float y) {
  const float largest = fmaxf(x, y), smallest = fminf(x, y);
  if (largest == -INFINITY) return x + y;  // NaN if one of them is
  return largest + log1pf(expf(smallest - largest)) + (x != x || y != y ? NAN : 0.0f);
}

// -C, 0 for the columns that have no score yet.
__device__ inline float potential_of(float c) { return c == -INFINITY ? 0.0f : -c; }

// A warp's iteration of a block's matrix.
template <int kColumns>
struct CumulativeWarp {
  using Row = float[kColumns];

  const BalanceParams& p;
  int size, iteration, lane;
  const float* scores;

  __device__ explicit CumulativeWarp(const BalanceParams& params)
      : p(params),
        size(params.rows),
        iteration(warp_number()),
        lane(lane_number()),
        scores(params.scores + std::int64_t{blockIdx.x} * params.rows * params.rows) {}

  __device__ bool is_last() const { return iteration == p.iterations - 1; }
  // What a warp hands to the next one in step t.
  __device__ static float& handed(int t, int warp) {
    return reinterpret_cast<float*>(balance_memory)[t % 2 * kWarp + warp];
  }

  // Calls use(k, v) for the columns v of the lane.
  template <typename Use>
  __device__ void visit(Use use) const {
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
      if (lane + k * kWarp < size) use(k, lane + k * kWarp);
    }
  }
  // Row u of [N, N]; `missing` beyond the last column.
  __device__ void load(const float* numbers, int u, float missing, Row& x) const {
#pragma unroll
    for (int k = 0; k < kColumns; ++k) x[k] = missing;
    visit([&](int k, int v) { x[k] = numbers[u * size + v]; });
  }

  // Calls use(u, row u of S, of C, f) for each row in turn.
  template <typename Use>
  __device__ void forward(Use use) const {
    Row c, s;
#pragma unroll
    for (int k = 0; k < kColumns; ++k) c[k] = -INFINITY;
    load(scores, 0, -INFINITY, s);
    for (int t = 0; t < size + p.iterations - 1; ++t) {
      const int u = t - iteration;
      if (u >= 0 && u < size) {
        const float before = iteration == 0 ? 0.0f : handed(t - 1, iteration - 1);
        float largest = 0, sum = 0;
#pragma unroll
        for (int k = 0; k < kColumns; ++k) {
          c[k] = log_add(c[k], s[k] + before);
          largest = fmaxf(largest, s[k] + potential_of(c[k]));
        }
        largest = warp_max(largest);
#pragma unroll
        for (int k = 0; k < kColumns; ++k) sum += expf(s[k] + potential_of(c[k]) - largest);
        const float f = -(largest + logf(lane_sum<kWarp>(sum) + expf(-largest)));
        if (lane == 0) handed(t, iteration) = f;
        use(u, s, c, f);
        if (u + 1 < size) load(scores, u + 1, -INFINITY, s);
      }
      __syncthreads();
    }
  }
};

template <int kColumns>
__global__ void __launch_bounds__(kMostThreads) cumulative_kernel(const BalanceParams p) {
  const CumulativeWarp<kColumns> warp(p);
  float* const result = p.p + std::int64_t{blockIdx.x} * p.rows * p.rows;
  warp.forward([&](int u, const float(&s)[kColumns], const float(&c)[kColumns], float f) {
    if (!warp.is_last()) return;
    warp.visit([&](int k, int v) { result[u * p.rows + v] = expf(s[k] + f + potential_of(c[k])); });
  });
}

template <int kColumns>
__global__ void __launch_bounds__(kMostThreads)
    cumulative_gradients_kernel(const BalanceBackwardParams backward) {
  using Row = float[kColumns];
  const BalanceParams& p = backward.problems;
  const int N = p.rows, I = p.iterations;
  const CumulativeWarp<kColumns> warp(p);
  const std::int64_t first = std::int64_t{blockIdx.x} * N * N;
  // f [I, N], then C [I, N, N].
  float* const all_f = backward.vectors + blockIdx.x * BalanceBackwardParams::vectors_per_matrix(p);
  float *const f_of = all_f + warp.iteration * N, *const c_of =
                                                      all_f + I * N + warp.iteration * N * N;
  warp.forward([&](int u, const Row&, const Row& c, float f) {
    if (warp.lane == 0) f_of[u] = f;
    warp.visit([&](int k, int v) { c_of[u * N + v] = c[k]; });
  });
  const float* const d_p = backward.d_p + first;
  float* const d_scores = backward.d_scores + first;
  Row r = {}, g_after = {};
  for (int t = 0; t < N + I - 1; ++t) {
    const int u = N - 1 - (t - (I - 1 - warp.iteration));
    if (u >= 0 && u < N) {
      Row s, c, d, y;
      warp.load(warp.scores, u, -INFINITY, s);
      warp.load(c_of, u, -INFINITY, c);
      warp.load(warp.is_last() ? d_p : d_scores, u, 0, d);
      const float f = f_of[u], before = warp.iteration == 0 ? 0.0f : f_of[u - N];
      float x = 0;
#pragma unroll
      for (int k = 0; k < kColumns; ++k) y[k] = expf(s[k] + f + potential_of(c[k]));
      if (warp.is_last()) {
#pragma unroll
        for (int k = 0; k < kColumns; ++k) x += y[k] * d[k];
        x = lane_sum<kWarp>(x);
      } else {
        x = CumulativeWarp<kColumns>::handed(t - 1, warp.iteration + 1);
      }
      float sum = 0;
#pragma unroll
      for (int k = 0; k < kColumns; ++k) {
        const float g = potential_of(c[k]);
        y[k] *= warp.is_last() ? d[k] - x : -x;
        const float decay = u + 1 < N ? expf(fminf(g_after[k] - g, 0)) : 0.0f;
        r[k] = y[k] + decay * r[k];
        g_after[k] = g;
        const float flow = expf(s[k] + before + g) * r[k];
        d[k] = (warp.is_last() ? 0.0f : d[k]) + y[k] - flow;
        sum += flow;
      }
      warp.visit([&](int k, int v) { d_scores[u * N + v] = d[k]; });
      sum = lane_sum<kWarp>(sum);
      if (warp.lane == 0) CumulativeWarp<kColumns>::handed(t, warp.iteration) = -sum;
    }
    __syncthreads();
  }
}

// Calls f<kColumns>() for the kernels that hold the problem.
template <typename Function>
void with_columns(const BalanceParams& p, Function f) {
  static_assert(BalanceParams::kMaxBlocks == 8 * kWarp);
  if (p.rows <= 2 * kWarp) return f.template operator()<2>();
  f.template operator()<8>();
}

LaunchShape shape_of(const BalanceParams& p, cudaStream_t stream) {
  return {.blocks = p.rows == 0 ? 0 : p.matrices,
          .threads = p.iterations * kWarp,
          .stream = stream,
          .shared_bytes = sizeof(float) * 2 * kWarp};
}

}  // namespace

void launch_cumulative_balance(const BalanceParams& params, cudaStream_t stream) {
  with_columns(params, [&]<int kColumns>() {
    launch(shape_of(params, stream), &cumulative_kernel<kColumns>, params);
  });
}

void launch_cumulative_balance_backward(const BalanceBackwardParams& params, cudaStream_t stream) {
  with_columns(params.problems, [&]<int kColumns>() {
    launch(shape_of(params.problems, stream), &cumulative_gradients_kernel<kColumns>, params);
  });
}

}  // namespace birkhoff
