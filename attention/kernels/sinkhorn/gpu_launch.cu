// The Sinkhorn operator (attention/kernels/sinkhorn/sinkhorn.h; Tay et al. 2020, section 3.1.1)
// forward and backward, for whole matrices; gpu_prefix.cu handles prefixes and gpu_small_prefix.cu
// prefixes of few rows. Legend: r destination of R, c source of C, i iteration of I.
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
constexpr int kMatrixThreads = 512;

template <int kSize>
__global__ void __launch_bounds__(SmallMatrix<kSize>::kThreads, SmallMatrix<kSize>::kBlocks)
    small_kernel(const BalanceParams p) {
  SmallMatrix<kSize>(p, blockIdx.x).write_p();
}

template <int kSize>
__global__ void __launch_bounds__(SmallMatrix<kSize>::kThreads, SmallMatrix<kSize>::kBlocks)
    small_backward_kernel(const BalanceBackwardParams p) {
  SmallMatrix<kSize>(p.problems, blockIdx.x).write_d_scores(p);
}

// The problem of a block.
template <bool kShared>
using LargeMatrix =
    LogDomainProblem<BalanceParams::kMaxBlocks / kWarp, kMatrixThreads / kWarp, kShared>;

template <bool kShared>
__global__ void __launch_bounds__(kMatrixThreads, 1) forward_kernel(const BalanceParams p) {
  const LargeMatrix<kShared> problem(p, blockIdx.x, 0, reinterpret_cast<float*>(balance_memory));
  problem.write_p(p.iterations, p.p);
  round_p<kMatrixThreads>(p, blockIdx.x);
}

template <bool kShared>
__global__ void __launch_bounds__(kMatrixThreads, 1) vectors_kernel(const BalanceBackwardParams p) {
  const BalanceParams& forward = p.problems;
  const std::int64_t matrix = blockIdx.x;
  const LargeMatrix<kShared> problem(forward, matrix, 0, reinterpret_cast<float*>(balance_memory));
  problem.write_vectors(forward.iterations, p.d_p, Vectors(p, matrix),
                        p.d_scores + matrix * forward.rows * forward.columns);
}

// One thread per score.
__global__ void __launch_bounds__(kScoresThreads) scores_kernel(const BalanceBackwardParams p) {
  const int size = p.problems.rows * p.problems.columns;
  const std::int64_t thread = std::int64_t{blockIdx.x} * kScoresThreads + threadIdx.x;
  const std::int64_t matrix = thread / size;
  if (matrix >= p.problems.matrices) return;
  subtract_log_domain_share(p, Vectors(p, matrix), matrix * size, static_cast<int>(thread % size));
}

// The bytes of shared memory that a block may have.
std::size_t most_shared() {
  int device = 0, bytes = 0;
  cuda_check(cudaGetDevice(&device), "cudaGetDevice");
  cuda_check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
             "cudaDeviceGetAttribute");
  return static_cast<std::size_t>(bytes);
}

template <typename Params>
void launch_problems(void (*kernel)(Params), std::int64_t matrices, int threads,
                     const Params& params, std::size_t shared_bytes, cudaStream_t stream) {
  cuda_check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                  cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(shared_bytes)),
             "cudaFuncSetAttribute");
  launch({.grid = dim3(static_cast<unsigned>(matrices)),
          .block = dim3(static_cast<unsigned>(threads)),
          .stream = stream,
          .shared_bytes = shared_bytes},
         kernel, params);
}

// Calls launch_kernel<kSize>(bytes of shared memory) if the kernels for small matrices can keep
// `num_vectors` vectors. Otherwise returns false.
template <typename Launch>
bool with_small_matrix(const BalanceParams& p, int num_vectors, Launch launch_kernel) {
  const auto with_size = [&]<int kSize>() {
    const std::size_t shared_bytes = SmallMatrix<kSize>::shared_bytes(num_vectors);
    if (shared_bytes > most_shared()) return false;
    launch_kernel.template operator()<kSize>(shared_bytes);
    return true;
  };
  const int size = max(p.rows, p.columns);
  if (size <= 16) return with_size.template operator()<16>();
  if (size <= 32) return with_size.template operator()<32>();
  if (size <= 64) return with_size.template operator()<64>();
  return size <= 128 && with_size.template operator()<128>();
}

// Calls launch_kernel<scores in shared memory?>(bytes of shared memory).
template <typename Launch>
void with_large_matrix(const BalanceParams& p, Launch launch_kernel) {
  const std::size_t shared_bytes = LargeMatrix<true>::shared_bytes(p.rows, p.columns);
  if (shared_bytes <= most_shared()) return launch_kernel.template operator()<true>(shared_bytes);
  launch_kernel.template operator()<false>(LargeMatrix<false>::shared_bytes(p.rows, p.columns));
}

}  // namespace

void launch_balance(const BalanceParams& params, cudaStream_t stream) {
  if (params.matrices == 0) return;
  if (params.prefix) {
    const bool small = params.rows <= BalanceParams::kMaxSmallRows;
    return small ? small_prefix::launch_prefix_balance(params, stream)
                 : launch_prefix_balance(params, stream);
  }
  const bool launched = with_small_matrix(params, 2, [&]<int kSize>(std::size_t shared_bytes) {
    launch_problems(&small_kernel<kSize>, params.matrices, SmallMatrix<kSize>::kThreads, params,
                    shared_bytes, stream);
  });
  if (launched) return;
  with_large_matrix(params, [&]<bool kShared>(std::size_t shared_bytes) {
    launch_problems(&forward_kernel<kShared>, params.matrices, kMatrixThreads, params, shared_bytes,
                    stream);
  });
}

void launch_balance_backward(const BalanceBackwardParams& params, cudaStream_t stream) {
  const BalanceParams& problems = params.problems;
  const std::int64_t entries = problems.matrices * problems.rows * problems.columns;
  if (entries == 0) return;
  if (problems.prefix) {
    const bool small = problems.rows <= BalanceParams::kMaxSmallRows;
    return small ? small_prefix::launch_prefix_balance_backward(params, stream)
                 : launch_prefix_balance_backward(params, stream);
  }
  const bool launched = with_small_matrix(
      problems, 4 * problems.iterations + 2, [&]<int kSize>(std::size_t shared_bytes) {
        launch_problems(&small_backward_kernel<kSize>, problems.matrices,
                        SmallMatrix<kSize>::kThreads, params, shared_bytes, stream);
      });
  if (launched) return;
  with_large_matrix(problems, [&]<bool kShared>(std::size_t shared_bytes) {
    launch_problems(&vectors_kernel<kShared>, problems.matrices, kMatrixThreads, params,
                    shared_bytes, stream);
  });
  launch({.grid = dim3(static_cast<unsigned>((entries + kScoresThreads - 1) / kScoresThreads)),
          .block = dim3(kScoresThreads),
          .stream = stream},
         scores_kernel, params);
}

}  // namespace birkhoff
