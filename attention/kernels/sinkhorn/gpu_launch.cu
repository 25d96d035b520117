// The Sinkhorn operator (attention/kernels/sinkhorn/sinkhorn.h; Tay et al. 2020, section 3.1.1)
// forward and backward, for whole matrices; gpu_prefix.cu handles prefixes, gpu_small_prefix.cu
// prefixes of few rows and gpu_cumulative.cu the cumulative balance. Legend: r destination of R, c
// source of C, i iteration of I.
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
// R, C <= 256; fp32; a block of threads owns one matrix: its steps wait for each other, so only
// more threads make it faster. P is written once, and rounded for mixing if wanted. Neither pass
// keeps anything for the other but S. No atomics: deterministic.
//
// small: R, C <= 128, in the ordinary domain (gpu_small.cuh), by 32, 128 or 512 threads. With a_i =
//   exp(f_i) and b_i = exp(g_{i+1}), each step is the product of E = exp(S), in registers, and a
//   vector:
//
//     b_i[c] = 1 / sum_r a_i[r] E[r, c]        a_0 = 1
//     a_{i+1}[r] = 1 / sum_c E[r, c] b_i[c]    P[r, c] = E[r, c] b_{I-1}[c] a_I[r]
//
//   and backward, from i = I - 1 down, with x and y divided by these factors, and x of the last row
//   step in d, where it cancels best:
//
//     d[r, c] = P[r, c] (dLoss/dP[r, c] - sum_c' P[r, c'] dLoss/dP[r, c'])
//     x_i[r] = 0, then -a_{i+1}[r]^2 sum_c E[r, c] y_{i+1}[c]
//     y_i[c] = b_i[c] sum_r d[r, c], then -b_i[c]^2 sum_r x_i[r] E[r, c]
//     dS[r, c] = d[r, c] - E[r, c] sum_i (x_i[r] b_i[c] + a_i[r] y_i[c])
//
//   Vectors stay in shared memory, from which the backward pass adds up dS in the end. There is no
//   shift. If a score or sum leaves the number range (range.h), the block starts again in the log
//   domain. Nothing waits for the host.
// The other kernels solve larger matrices, and matrices with too many iterations for their vectors
//   to fit in shared memory, in the log domain (gpu_log_domain.cuh), by 512 threads. Scores are
//   read once, into shared memory, if R C elements fit there (R = C <= 232 on sm_90, 195 on sm_80);
//   otherwise each pass reads them from L2. Backward: the block recomputes f and g, computes x and
//   y, and writes the four vectors of each iteration to memory; a second kernel, with one
//   thread per entry, sums them up to dS.
#include "attention/kernels/sinkhorn/gpu_log_domain.cuh"
#include "attention/kernels/sinkhorn/gpu_params.h"
#include "attention/kernels/sinkhorn/gpu_small.cuh"

namespace birkhoff {
namespace {

constexpr int kScoresThreads = 256;

// A matrix of any size in the log domain, with the interface of SmallMatrix.
template <bool kShared>
struct LargeMatrix {
  static constexpr int kThreads = 512, kBlocks = 1;
  static constexpr bool kCompletes = false;  // scores_kernel completes dLoss/dS
  using Problem = LogDomainProblem<BalanceParams::kMaxBlocks / kWarp, kThreads / kWarp, kShared>;

  const BalanceParams& p;
  std::int64_t matrix;
  Problem problem;

  __device__ LargeMatrix(const BalanceParams& params, std::int64_t number)
      : p(params),
        matrix(number),
        problem(params, number, 0, reinterpret_cast<float*>(balance_memory)) {}

  __device__ void write_p() const {
    problem.write_p(p.iterations, p.p);
    round_p<kThreads>(p, matrix);
  }
  __device__ void write_d_scores(const BalanceBackwardParams& backward) const {
    problem.write_vectors(p.iterations, backward.d_p, Vectors(backward, matrix),
                          backward.d_scores + matrix * p.rows * p.columns);
  }
};

template <typename Matrix>
__global__ void __launch_bounds__(Matrix::kThreads, Matrix::kBlocks)
    forward_kernel(const BalanceParams p) {
  Matrix(p, blockIdx.x).write_p();
}

template <typename Matrix>
__global__ void __launch_bounds__(Matrix::kThreads, Matrix::kBlocks)
    backward_kernel(const BalanceBackwardParams p) {
  Matrix(p.problems, blockIdx.x).write_d_scores(p);
}

// One thread per score.
__global__ void __launch_bounds__(kScoresThreads) scores_kernel(const BalanceBackwardParams p) {
  const int size = p.problems.rows * p.problems.columns;
  const std::int64_t thread = std::int64_t{blockIdx.x} * kScoresThreads + threadIdx.x;
  const std::int64_t matrix = thread / size;
  if (matrix >= p.problems.matrices) return;
  subtract_log_domain_share(p, Vectors(p, matrix), matrix * size, static_cast<int>(thread % size));
}

// Calls use<Matrix>(bytes of shared memory): with the least SmallMatrix that holds the problem and
// can keep `num_vectors` vectors, or else with a LargeMatrix.
template <typename Use>
void with_matrix(const BalanceParams& p, int num_vectors, Use use) {
  const auto use_small = [&]<int kSize>() {
    const std::size_t shared_bytes = SmallMatrix<kSize>::shared_bytes(num_vectors);
    const bool fits = max(p.rows, p.columns) <= kSize && shared_bytes <= most_shared_bytes();
    if (fits) use.template operator()<SmallMatrix<kSize>>(shared_bytes);
    return fits;
  };
  if (use_small.template operator()<16>() || use_small.template operator()<32>() ||
      use_small.template operator()<64>() || use_small.template operator()<128>()) {
    return;
  }
  const std::size_t shared_bytes = LargeMatrix<true>::Problem::shared_bytes(p.rows, p.columns);
  if (shared_bytes <= most_shared_bytes()) {
    return use.template operator()<LargeMatrix<true>>(shared_bytes);
  }
  use.template operator()<LargeMatrix<false>>(
      LargeMatrix<false>::Problem::shared_bytes(p.rows, p.columns));
}

}  // namespace

void launch_balance(const BalanceParams& params, cudaStream_t stream) {
  if (params.kind == BalanceKind::kCumulative) return launch_cumulative_balance(params, stream);
  if (params.prefix()) {
    const bool small = params.rows <= BalanceParams::kMaxSmallRows;
    return small ? small_prefix::launch_prefix_balance(params, stream)
                 : launch_prefix_balance(params, stream);
  }
  with_matrix(params, 2, [&]<typename Matrix>(std::size_t shared_bytes) {
    launch({.blocks = params.matrices,
            .threads = Matrix::kThreads,
            .stream = stream,
            .shared_bytes = shared_bytes},
           &forward_kernel<Matrix>, params);
  });
}

void launch_balance_backward(const BalanceBackwardParams& params, cudaStream_t stream) {
  const BalanceParams& problems = params.problems;
  const std::int64_t entries = problems.matrices * problems.rows * problems.columns;
  if (entries == 0) return;
  if (problems.kind == BalanceKind::kCumulative) {
    return launch_cumulative_balance_backward(params, stream);
  }
  if (problems.prefix()) {
    const bool small = problems.rows <= BalanceParams::kMaxSmallRows;
    return small ? small_prefix::launch_prefix_balance_backward(params, stream)
                 : launch_prefix_balance_backward(params, stream);
  }
  with_matrix(problems, 4 * problems.iterations + 2, [&]<typename Matrix>(std::size_t bytes) {
    launch({.blocks = problems.matrices,
            .threads = Matrix::kThreads,
            .stream = stream,
            .shared_bytes = bytes},
           &backward_kernel<Matrix>, params);
    if (Matrix::kCompletes) return;
    launch({.blocks = (entries + kScoresThreads - 1) / kScoresThreads,
            .threads = kScoresThreads,
            .stream = stream},
           scores_kernel, params);
  });
}

}  // namespace birkhoff
