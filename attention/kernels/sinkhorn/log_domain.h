// The balances in the log domain, in LibTorch operations. They are the specification, and they
// solve the matrices outside the kernels' number range. Legend and conventions: sinkhorn.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <limits>
#include <vector>

namespace birkhoff {

constexpr double kBarred = -std::numeric_limits<double>::infinity();

// P and the potentials from which it was computed: for each iteration g of its column step, then f
// of its row step. The gradient needs only these, no matrix per iteration.
struct Solution {
  at::Tensor p;
  std::vector<at::Tensor> potentials;
};

// Whether a solution keeps its potentials. If it does, memory grows with the iterations.
enum class Keep { kNothing, kPotentials };

// The Sinkhorn operator on scores [.., R, C] of any range, without autograd.
Solution solve(const at::Tensor& scores, std::int64_t iterations, Keep keep);
// dLoss/dS given d_p = dLoss/dP and a solution that kept its potentials.
at::Tensor solution_gradient(const at::Tensor& scores, const Solution& solution,
                             const at::Tensor& d_p);

// The cumulative operator, with g and f of each iteration. g of row u is -log of the sum over
// destinations u' <= u, so g is a matrix: g_uv.
Solution solve_cumulative(const at::Tensor& scores, std::int64_t iterations, Keep keep);
at::Tensor cumulative_gradient(const at::Tensor& scores, const Solution& solution,
                               const at::Tensor& d_p);

// Path::kReference of balance(), prefix_balance() and cumulative_balance().
at::Tensor reference_balance(const at::Tensor& scores, std::int64_t iterations);
at::Tensor reference_prefix_balance(const at::Tensor& scores, std::int64_t iterations,
                                    std::int64_t first_row);
at::Tensor reference_cumulative_balance(const at::Tensor& scores, std::int64_t iterations);

}  // namespace birkhoff
