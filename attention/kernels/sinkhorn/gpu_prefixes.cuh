// The common part of the kernels of gpu_prefix.cu, which has the formulas and the legend, and of
// gpu_small_prefix.cu: panels of prefixes, and prefixes that leave the number range.
#pragma once

#include <cstddef>

#include "attention/kernels/sinkhorn/gpu_log_domain.cuh"
#include "attention/kernels/sinkhorn/range.h"
#include "cluster/base/gpu/elements.cuh"

namespace birkhoff {
namespace {

// As many threads as a matrix can have prefixes.
constexpr int kThreads = BalanceParams::kMaxBlocks, kWarps = kThreads / kWarp;
constexpr int kTile = BalanceParams::kTile;
constexpr int kPrefixesPerBlock = 16;  // in the log domain

// exp(s), 0 where s is out of range.
__device__ inline float exponential(float s) {
  return fabsf(s) <= DeviceBalanceRange::kSpread ? expf(s) : 0.0f;
}

// The scratch memory of a call that all kernels read. Before it lie E and its transpose.
struct PrefixScratch {
  float* limits;         // [matrices, tiles]: the first prefix that is out of range
  float* in_log_domain;  // [matrices, results]: 1 where a problem is solved in the log domain, or 0

  __device__ explicit PrefixScratch(const BalanceParams& p)
      : limits(p.scratch + p.matrices * p.num_tiles() * 2 * kTile * kTile),
        in_log_domain(limits + p.matrices * p.num_tiles()) {}
};

// Calls use(row, lane, E) for the elements of a kTile x kTile tile, from (r0, c0) on, and sets
// the tile's limit. All threads of the block call this; when it returns, they see what `use` wrote.
// `memory`: [kWarps], shared.
template <typename Use>
__device__ inline void visit_exponentials(const BalanceParams& p, std::int64_t matrix, int r0,
                                          int c0, float* memory, float& tile_limit, Use use) {
  const int N = p.rows, warp = warp_number(), lane = lane_number();
  float limit = static_cast<float>(N);
  for (int row = warp; row < kTile; row += kWarps) {
    const int r = r0 + row, c = c0 + lane;
    const float s = r > 0 && r < N && c < N ? p.scores[(matrix * N + r) * N + c] : -INFINITY;
    const bool in_range = fabsf(s) <= DeviceBalanceRange::kSpread;
    // The first prefix that holds the entry is u = max(r, c + 1).
    if (!in_range && s != -INFINITY) limit = fminf(limit, static_cast<float>(max(r, c + 1)));
    use(row, lane, exponential(s));
  }
  limit = -warp_max(-limit);
  if (lane == 0) memory[warp] = limit;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int w = 1; w < kWarps; ++w) limit = fminf(limit, memory[w]);
  tile_limit = limit;
}

// A panel of kCount successive prefixes of a matrix, as its block sees it. Panels that derive from
// it have, for the functions below:
//   LogDomain: solves a problem that has left the number range
//   shared_bytes(rows): of a block
//   vectors_of(p, matrix, result): the Vectors of a prefix
//   start(each_a): sets a_u0 and calls each_a(0, k, j, x)
//   step<kColumnStep>(update): a column step, from rows to columns, or a row step. update(k, j, x)
//     changes elements of prefix k from j on. All threads of the block call this; when it returns,
//     they see what `update` wrote.
//   e_at(u, c): E[u, c];  b_at(k, c): the result of the last step, for prefix k
//   set_y(k, c, x, y), in any thread, then finish_y(vectors, i), in all: that result becomes y_ui,
//     of which x is element c and `y` the vector in memory
template <int kCount>
struct PrefixPanel {
  static constexpr int kPrefixes = kCount;

  int size, matrix, first_prefix;
  int warp, lane;

  // Blocks of the longest prefixes come first: they take longest.
  __device__ explicit PrefixPanel(const BalanceParams& p)
      : size(p.rows), warp(warp_number()), lane(lane_number()) {
    const int panels = num_panels(p.results);
    const int index = panels - 1 - static_cast<int>(blockIdx.x / p.matrices);
    matrix = static_cast<int>(blockIdx.x % p.matrices);
    first_prefix = p.first_row + index * kPrefixes;
    const float* limits = PrefixScratch(p).limits + std::int64_t{matrix} * p.num_tiles();
    float limit = static_cast<float>(size);
    for (int tile = 0; tile < p.num_tiles(); ++tile) limit = fminf(limit, limits[tile]);
    for (int k = static_cast<int>(threadIdx.x); k < kPrefixes; k += kThreads) {
      failed()[k] = static_cast<float>(first_prefix + k) >= limit ? 1.0f : 0.0f;
    }
  }

  // Shared memory: [kPrefixes], 1 where a prefix is not solved; then the panel's, or the log
  // domain's, which needs less.
  __device__ static float* failed() { return reinterpret_cast<float*>(balance_memory); }
  __device__ static float* memory() { return failed() + kPrefixes; }

  __host__ __device__ static int num_panels(int results) {
    return (results + kPrefixes - 1) / kPrefixes;
  }

  // 1 / x where x > 0, else 0. Marks prefix k as failed if x is out of range.
  __device__ float inverse(float x, int k) const {
    if (x == 0) return 0;
    if (!(x > DeviceBalanceRange::kMin && x < 1 / DeviceBalanceRange::kMin)) failed()[k] = 1;
    return 1 / x;
  }
};

// Runs all column steps and the row steps between them; each_a(i, k, j, x) and each_b(i, k, j, x)
// receive a_ui and b_ui. Then runs the last row step, for row u only: one warp per prefix calls
// each_result(k, u, 1 / a_uI[u]), the same in all lanes, with b_u,I-1 in b_at(k, .).
template <typename Panel, typename EachA, typename EachB, typename EachResult>
__device__ inline void solve(const Panel& panel, int iterations, EachA each_a, EachB each_b,
                             EachResult each_result) {
  const auto invert = [&](int k, auto& x) {
#pragma unroll
    for (float& each : x) each = panel.inverse(each, k);
  };
  panel.start(each_a);
  for (int i = 0; i < iterations; ++i) {
    if (i > 0) {
      panel.template step<false>([&](int k, int j, auto& x) {
        invert(k, x);
        each_a(i, k, j, x);
      });
    }
    panel.template step<true>([&](int k, int j, auto& x) {
      invert(k, x);
      each_b(i, k, j, x);
    });
  }
  for (int k = panel.warp; k < Panel::kPrefixes; k += kWarps) {
    const int u = panel.first_prefix + k;
    if (u >= panel.size) break;
    float sum = 0;
    for (int c = panel.lane; c < u; c += kWarp) sum += panel.e_at(u, c) * panel.b_at(k, c);
    sum = warp_sum(sum);
    panel.inverse(sum, k);  // P is a quotient: 1 where it has one term
    each_result(k, u, sum > 0 ? sum : 1.0f);
  }
  __syncthreads();
}

template <typename Panel>
__global__ void __launch_bounds__(kThreads, 2) prefix_forward_kernel(const BalanceParams p) {
  const Panel panel(p);
  const int N = p.rows;
  const auto nothing = [](int, int, int, const auto&) {};
  solve(panel, p.iterations, nothing, nothing, [&](int k, int u, float total) {
    float* out = p.p + (std::int64_t{panel.matrix} * p.results + u - p.first_row) * N;
    for (int c = panel.lane; c < N; c += kWarp) {
      out[c] = c < u ? panel.e_at(u, c) * panel.b_at(k, c) / total : 0.0f;
    }
  });
  for (int k = 0; k < Panel::kPrefixes && panel.first_prefix + k < N; ++k) {
    if (panel.failed()[k] == 0) continue;
    const typename Panel::LogDomain problem(p, panel.matrix, panel.first_prefix + k - p.first_row,
                                            panel.memory());
    problem.write_p(p.iterations, p.p);
    __syncthreads();
  }
}

// Adjacent elements of a vector.
template <int kCount>
__device__ inline void write(float* vector, int j, const float (&x)[kCount]) {
  Vector<float, kCount> elements;
#pragma unroll
  for (int n = 0; n < kCount; ++n) elements.elements[n] = x[n];
  store_vector(vector + j, elements);
}

// For solved prefixes, f of Vectors is a_ui and g is b_ui. Row u of d_scores becomes d.
template <typename Panel>
__global__ void __launch_bounds__(kThreads, 2)
    prefix_vectors_kernel(const BalanceBackwardParams p) {
  const BalanceParams& forward = p.problems;
  const Panel panel(forward);
  const int N = forward.rows, I = forward.iterations;
  const int first_result = panel.first_prefix - forward.first_row;
  const auto vectors = [&](int k) {
    asm volatile("" : "+r"(k));  // or else the pointers of all prefixes stay in registers
    return Panel::vectors_of(p, panel.matrix, first_result + k);
  };
  solve(
      panel, I, [&](int i, int k, int j, const auto& x) { write(vectors(k).f(i), j, x); },
      [&](int i, int k, int j, const auto& x) { write(vectors(k).g(i), j, x); },
      [&](int k, int u, float total) {
        const float* d_p =
            p.d_p + (std::int64_t{panel.matrix} * forward.results + first_result + k) * N;
        float* d_scores = p.d_scores + (std::int64_t{panel.matrix} * N + u) * N;
        float* y = vectors(k).y(I - 1);
        float sum = 0;
        for (int c = panel.lane; c < u; c += kWarp) {
          sum += panel.e_at(u, c) * panel.b_at(k, c) / total * d_p[c];
        }
        sum = warp_sum(sum);
        for (int c = panel.lane; c < u; c += kWarp) {
          const float b = panel.b_at(k, c);
          const float d = panel.e_at(u, c) * b / total * (d_p[c] - sum);
          d_scores[c] = d;
          panel.set_y(k, c, d * b, y);
        }
      });
  panel.finish_y(vectors, I - 1);

  // x = -factors^2 x; the square itself could leave the number range.
  const auto flow_back = [](const float* factors, int j, auto& x) {
    constexpr int kCount = sizeof(x) / sizeof(float);
    const auto f = load_vector<float, kCount>(factors + j);
#pragma unroll
    for (int n = 0; n < kCount; ++n) x[n] = -(x[n] * f.elements[n]) * f.elements[n];
  };
  for (int i = I - 2; i >= 0; --i) {
    panel.template step<false>([&](int k, int j, auto& x) {
      const Vectors of_prefix = vectors(k);
      flow_back(of_prefix.f(i + 1), j, x);
      write(of_prefix.x(i), j, x);
    });
    panel.template step<true>([&](int k, int j, auto& y) {
      const Vectors of_prefix = vectors(k);
      flow_back(of_prefix.g(i), j, y);
      write(of_prefix.y(i), j, y);
    });
  }
  float* in_log_domain =
      PrefixScratch(forward).in_log_domain + panel.matrix * forward.results + first_result;
  for (int k = static_cast<int>(threadIdx.x); k < Panel::kPrefixes; k += kThreads) {
    if (panel.first_prefix + k < N) in_log_domain[k] = panel.failed()[k];
  }
}

// Solves the prefixes that prefix_vectors_kernel has not solved, kPrefixesPerBlock per block. One
// kernel for both would not have enough registers.
template <typename Panel>
__global__ void __launch_bounds__(kThreads, 1)
    prefix_log_domain_kernel(const BalanceBackwardParams p) {
  const BalanceParams& forward = p.problems;
  const int first = static_cast<int>(blockIdx.x / forward.matrices) * kPrefixesPerBlock;
  const std::int64_t matrix = blockIdx.x % forward.matrices;
  const float* in_log_domain = PrefixScratch(forward).in_log_domain + matrix * forward.results;
  for (int result = first; result < min(first + kPrefixesPerBlock, forward.results); ++result) {
    if (in_log_domain[result] == 0) continue;
    const typename Panel::LogDomain problem(forward, matrix, result,
                                            reinterpret_cast<float*>(balance_memory));
    problem.write_vectors(forward.iterations, p.d_p, Panel::vectors_of(p, matrix, result),
                          p.d_scores + matrix * forward.rows * forward.columns);
    __syncthreads();
  }
}

// Whether any problem of a matrix is solved in the log domain. All threads of the block call this.
// `memory`: [1], shared.
__device__ inline bool any_in_log_domain(const float* in_log_domain, int results, float* memory) {
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) *memory = 0;
  __syncthreads();
  if (thread < results && in_log_domain[thread] != 0) *memory = 1;
  __syncthreads();
  return *memory != 0;
}

// Completes a kSide x kSide tile of dS, from (r0, c0) on, of which `flow` [kSide, kSide] has the
// sums over (u, i).
template <typename Panel, int kSide>
__device__ inline void write_d_scores(const BalanceBackwardParams& p, std::int64_t matrix, int r0,
                                      int c0, const float* flow, bool any_failed) {
  const BalanceParams& forward = p.problems;
  const float* in_log_domain = PrefixScratch(forward).in_log_domain + matrix * forward.results;
  const int N = forward.rows;
  for (int j = static_cast<int>(threadIdx.x); j < kSide * kSide; j += kThreads) {
    const int r = r0 + j / kSide, c = c0 + j % kSide;
    if (r >= N || c >= N) continue;
    const std::int64_t entry = (matrix * N + r) * N + c;
    const float s = r > 0 ? forward.scores[entry] : -INFINITY;
    float d = r >= forward.first_row && c < r ? p.d_scores[entry] : 0.0f;
    d -= exponential(s) * flow[j];
    int result = max(max(r, c + 1) - forward.first_row, 0);
    if (!any_failed) result = forward.results;
    for (; result < forward.results; ++result) {
      if (in_log_domain[result] == 0) continue;
      d -= log_domain_share(Panel::vectors_of(p, matrix, result), forward.iterations, r, c, s);
    }
    p.d_scores[entry] = s == -INFINITY ? 0.0f : d;
  }
}

// ---- Launches.

template <typename Params>
void launch_blocks(void (*kernel)(Params), std::int64_t blocks, const Params& params,
                   std::size_t shared_bytes, cudaStream_t stream) {
  launch({.blocks = blocks, .threads = kThreads, .stream = stream, .shared_bytes = shared_bytes},
         kernel, params);
}

template <typename Panel, typename Params>
void launch_panels(void (*kernel)(Params), const BalanceParams& p, const Params& params,
                   cudaStream_t stream) {
  launch_blocks(kernel, p.matrices * Panel::num_panels(p.results), params,
                Panel::shared_bytes(p.rows), stream);
}

// A kernel that calls visit_exponentials() for each tile, with a tile in shared memory.
inline void launch_exponentials(void (*kernel)(BalanceParams), const BalanceParams& p,
                                cudaStream_t stream) {
  launch_blocks(kernel, p.matrices * p.num_tiles(), p,
                sizeof(float) * (kTile * (kTile + 1) + kWarps), stream);
}

// The vectors of all prefixes.
template <typename Panel>
void launch_vectors(const BalanceBackwardParams& params, cudaStream_t stream) {
  const BalanceParams& p = params.problems;
  launch_panels<Panel>(&prefix_vectors_kernel<Panel>, p, params, stream);
  launch_blocks(&prefix_log_domain_kernel<Panel>,
                p.matrices * ((p.results + kPrefixesPerBlock - 1) / kPrefixesPerBlock), params,
                Panel::LogDomain::shared_bytes(p.rows, p.columns), stream);
}

}  // namespace
}  // namespace birkhoff
