// The Sinkhorn operator as a fused CPU kernel, in the ordinary domain. With E = exp(S - shift), a
// step is one matrix-vector product, P = diag(a) E diag(b), and each exponential is computed once.
// This fits the number format while scores lie within a moderate range; problems outside it are
// reported as unsolved, and the caller solves them in the log domain. Results have the dtype of the
// scores. Intermediate values are fp64, because gradients are small differences of large terms
// where the weights are nearly determined by their sums, and because fp64 costs next to nothing
// compared with attention. Conventions and legend: attention/kernels/sinkhorn/sinkhorn.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>

namespace birkhoff {

// How many matrices [.., R, C] holds.
inline std::int64_t num_matrices(const at::Tensor& x) {
  const std::int64_t size = x.size(-1) * x.size(-2);
  return size == 0 ? 0 : x.numel() / size;
}

// Returns P [.., R, C] and bool `solved` [.., 1, 1] for contiguous scores [.., R, C]. P is 0 for
// unsolved problems.
std::pair<at::Tensor, at::Tensor> balance_kernel(const at::Tensor& scores, std::int64_t iterations);
// Returns dLoss/dS given d_p = dLoss/dP; 0 for unsolved problems.
at::Tensor balance_kernel_backward(const at::Tensor& scores, const at::Tensor& d_p,
                                   std::int64_t iterations);

// The cumulative balance of [.., N, N]. `solved` [.., N, 1] is true for the rows before the first
// one that leaves the number range. Sources v >= u are not read.
std::pair<at::Tensor, at::Tensor> cumulative_balance_kernel(const at::Tensor& scores,
                                                            std::int64_t iterations);
at::Tensor cumulative_balance_kernel_backward(const at::Tensor& scores, const at::Tensor& d_p,
                                              std::int64_t iterations);

// Returns row u of each prefix u >= first_row: P [.., N - first_row, N] and `solved`
// [.., N - first_row, 1].
std::pair<at::Tensor, at::Tensor> prefix_balance_kernel(const at::Tensor& scores,
                                                        std::int64_t iterations,
                                                        std::int64_t first_row);
at::Tensor prefix_balance_kernel_backward(const at::Tensor& scores, const at::Tensor& d_p,
                                          std::int64_t iterations, std::int64_t first_row);

}  // namespace birkhoff
