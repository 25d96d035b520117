// The Sinkhorn operator as a fused CPU kernel, in the ordinary domain: with E = exp(S - shift) a
// step is one matrix-vector product, P = diag(a) E diag(b), and no exponential is taken twice. That
// fits the number format while scores lie within a moderate range; what does not fit is reported as
// unsolved, for the caller to solve in the log domain. Results have the dtype of the scores; what
// is between is fp64, because gradients are small differences of large terms where weights are
// nearly given by their sums, and because it costs next to nothing beside attention. Conventions
// and legend: attention/kernels/sinkhorn/sinkhorn.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>

namespace birkhoff {

// P [.., R, C] and bool `solved` [.., 1, 1] for contiguous scores [.., R, C]. Unsolved: P = 0.
std::pair<at::Tensor, at::Tensor> balance_kernel(const at::Tensor& scores, std::int64_t iterations);
// dLoss/dS given d_p = dLoss/dP; 0 for unsolved problems.
at::Tensor balance_kernel_backward(const at::Tensor& scores, const at::Tensor& d_p,
                                   std::int64_t iterations);

// The cumulative balance of [.., N, N]: `solved` [.., N, 1], by rows: all before the first row that
// leaves the number range. Sources v >= u are not read.
std::pair<at::Tensor, at::Tensor> cumulative_balance_kernel(const at::Tensor& scores,
                                                            std::int64_t iterations);
at::Tensor cumulative_balance_kernel_backward(const at::Tensor& scores, const at::Tensor& d_p,
                                              std::int64_t iterations);

// Row u of each prefix u >= first_row: P [.., N - first_row, N], `solved` [.., N - first_row, 1].
std::pair<at::Tensor, at::Tensor> prefix_balance_kernel(const at::Tensor& scores,
                                                        std::int64_t iterations,
                                                        std::int64_t first_row);
at::Tensor prefix_balance_kernel_backward(const at::Tensor& scores, const at::Tensor& d_p,
                                          std::int64_t iterations, std::int64_t first_row);

}  // namespace birkhoff
