// The balances in the log domain, in LibTorch's operations: the specification, and what solves the
// matrices outside the kernels' number range. Legend and conventions: sinkhorn.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <limits>
#include <vector>

namespace birkhoff {

constexpr double kBarred = -std::numeric_limits<double>::infinity();

// P and the potentials that made it: of each iteration its column step's g, then its row step's f.
// They are all that the gradient needs, no matrix per iteration.
struct Solution {
  at::Tensor p;
  std::vector<at::Tensor> potentials;
};

// Whether a solution must keep its potentials: memory grows with the iterations then.
enum class Keep { kNothing, kPotentials };

// The operator whatever the range of scores [.., R, C], without autograd.
Solution solve(const at::Tensor& scores, std::int64_t iterations, Keep keep);
// dLoss/dS given d_p = dLoss/dP and a solution that kept its potentials.
at::Tensor solution_gradient(const at::Tensor& scores, const Solution& solution,
                             const at::Tensor& d_p);

// The cumulative operator, and of each iteration g and f. g of row u is -log sum over destinations
// u' <= u, so it is a matrix: g_uv.
Solution solve_cumulative(const at::Tensor& scores, std::int64_t iterations, Keep keep);
at::Tensor cumulative_gradient(const at::Tensor& scores, const Solution& solution,
                               const at::Tensor& d_p);

// Path::kReference of balance(), prefix_balance() and cumulative_balance().
at::Tensor reference_balance(const at::Tensor& scores, std::int64_t iterations);
at::Tensor reference_prefix_balance(const at::Tensor& scores, std::int64_t iterations,
                                    std::int64_t first_row);
at::Tensor reference_cumulative_balance(const at::Tensor& scores, std::int64_t iterations);

}  // namespace birkhoff
