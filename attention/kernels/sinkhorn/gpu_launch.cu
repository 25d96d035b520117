// The Sinkhorn operator (attention/kernels/sinkhorn/sinkhorn.h; Tay et al. 2020, section 3.1.1)
// forward and backward, for whole matrices; gpu_prefix.cu handles prefixes. Legend: r destination
// of R, c source of C, i iteration of I.
//
//   g_i[c] = -log sum_r exp(S[r, c] + f_{i-1}[r])    f_0 = 0
//   f_i[r] = -log sum_c exp(S[r, c] + g_i[c])        P[r, c] = exp(S[r, c] + f_I[r] + g_I[c])
//
// Backward, with d = dLoss/dP, W_i = exp(S + f_i + g_i) and V_i = exp(S + f_{i-1} + g_i):
//
//   x_I[r] = sum_c (P d)[r, c]           x_{i-1}[r] = -sum_c V_i[r, c] y_i[c]
//   y_I[c] = sum_r (P (d - x_I))[r, c]   y_{i-1}[c] = -sum_r (x_{i-1} W_{i-1})[r, c]
//   dS = P (d - x_I) - sum_{i<I} x_i W_i - sum_i y_i V_i
//
// R, C <= 256; fp32, in the log domain (see gpu_log_domain.cuh). A block of 512 threads owns one
// matrix: its steps wait for each other, so only more threads make it faster. Scores are read once,
// into shared memory, if R C numbers fit there (R = C <= 232 on sm_90, 195 on sm_80); otherwise
// each pass reads them from L2. P is written once. Backward: the block recomputes f and g, computes
// x and y, and writes the four vectors of each iteration to memory; a second kernel, with one
// thread per entry, sums them up to dS. No atomics: deterministic.
#include "attention/kernels/sinkhorn/gpu_log_domain.cuh"
#include "attention/kernels/sinkhorn/gpu_params.h"

namespace birkhoff {
namespace {

constexpr int kScoresThreads = 256;
constexpr int kMatrixThreads = 512;

// The problem of a block. kGroups: columns per lane.
template <int kGroups, bool kShared>
using WholeMatrix = LogDomainProblem<kGroups, kMatrixThreads / kWarp, kShared>;

template <int kGroups, bool kShared>
__global__ void __launch_bounds__(kMatrixThreads, 1) forward_kernel(const BalanceParams p) {
  const WholeMatrix<kGroups, kShared> problem(p, blockIdx.x, 0,
                                              reinterpret_cast<float*>(balance_memory));
  problem.write_p(p.iterations, p.p);
}

template <int kGroups, bool kShared>
__global__ void __launch_bounds__(kMatrixThreads, 1) vectors_kernel(const BalanceBackwardParams p) {
  const BalanceParams& forward = p.problems;
  const std::int64_t matrix = blockIdx.x;
  const WholeMatrix<kGroups, kShared> problem(forward, matrix, 0,
                                              reinterpret_cast<float*>(balance_memory));
  problem.write_vectors(forward.iterations, p.d_p, Vectors(p, matrix),
                        p.d_scores + matrix * forward.rows * forward.columns);
}

// One thread per score.
__global__ void __launch_bounds__(kScoresThreads) scores_kernel(const BalanceBackwardParams p) {
  const BalanceParams& forward = p.problems;
  const std::int64_t entry = std::int64_t{blockIdx.x} * kScoresThreads + threadIdx.x;
  if (entry >= forward.matrices * forward.rows * forward.columns) return;
  const int c = static_cast<int>(entry % forward.columns);
  const int r = static_cast<int>(entry / forward.columns % forward.rows);
  const Vectors vectors(p, entry / forward.columns / forward.rows);
  const float s = forward.scores[entry];
  if (s == -INFINITY) {
    p.d_scores[entry] = 0;
  } else {
    p.d_scores[entry] -= log_domain_share(vectors, forward.iterations, r, c, s);
  }
}

// Calls launch_kernel<columns per lane, scores in shared memory?>(bytes of shared memory).
template <typename Launch>
void with_shape(const BalanceParams& p, Launch launch_kernel) {
  int device = 0, most_shared = 0;
  cuda_check(cudaGetDevice(&device), "cudaGetDevice");
  cuda_check(cudaDeviceGetAttribute(&most_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
             "cudaDeviceGetAttribute");
  const auto in_shared = [&]<int kGroups>() {
    launch_kernel.template operator()<kGroups, true>(
        WholeMatrix<kGroups, true>::shared_bytes(p.rows, p.columns));
  };
  if (p.columns <= 2 * kWarp) return in_shared.template operator()<2>();
  if (p.columns <= 4 * kWarp) return in_shared.template operator()<4>();
  if (WholeMatrix<8, true>::shared_bytes(p.rows, p.columns) <=
      static_cast<std::size_t>(most_shared)) {
    return in_shared.template operator()<8>();
  }
  launch_kernel.template operator()<8, false>(
      WholeMatrix<8, false>::shared_bytes(p.rows, p.columns));
}

template <typename Params>
void launch_problems(void (*kernel)(Params), const BalanceParams& problems, const Params& params,
                     std::size_t shared_bytes, cudaStream_t stream) {
  cuda_check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                  cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(shared_bytes)),
             "cudaFuncSetAttribute");
  launch({.grid = dim3(static_cast<unsigned>(problems.matrices)),
          .block = dim3(kMatrixThreads),
          .stream = stream,
          .shared_bytes = shared_bytes},
         kernel, params);
}

}  // namespace

void launch_balance(const BalanceParams& params, cudaStream_t stream) {
  if (params.matrices == 0) return;
  if (params.prefix) return launch_prefix_balance(params, stream);
  with_shape(params, [&]<int kGroups, bool kShared>(std::size_t shared_bytes) {
    launch_problems(&forward_kernel<kGroups, kShared>, params, params, shared_bytes, stream);
  });
}

void launch_balance_backward(const BalanceBackwardParams& params, cudaStream_t stream) {
  const BalanceParams& problems = params.problems;
  const std::int64_t entries = problems.matrices * problems.rows * problems.columns;
  if (entries == 0) return;
  if (problems.prefix) return launch_prefix_balance_backward(params, stream);
  with_shape(problems, [&]<int kGroups, bool kShared>(std::size_t shared_bytes) {
    launch_problems(&vectors_kernel<kGroups, kShared>, problems, params, shared_bytes, stream);
  });
  launch({.grid = dim3(static_cast<unsigned>((entries + kScoresThreads - 1) / kScoresThreads)),
          .block = dim3(kScoresThreads),
          .stream = stream},
         scores_kernel, params);
}

}  // namespace birkhoff
