// Legend: S scores, f row potentials, g column potentials, P weights; R rows, C columns, N blocks.
#include "attention/kernels/sinkhorn/log_domain.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>

#include "cluster/base/tensors/second_gradient.h"

namespace birkhoff {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// -log sum exp(x) over `dim`, which is kept. 0 where every entry is -inf, so that no potential is
// infinite.
at::Tensor potential(const at::Tensor& x, std::int64_t dim) {
  const at::Tensor max = x.amax(dim, /*keepdim=*/true);
  const at::Tensor shift = max.masked_fill(max == kBarred, 0);
  const at::Tensor log_sum = (x - shift).exp_().sum(dim, /*keepdim=*/true).log_().add_(shift);
  return log_sum.neg_().masked_fill_(max == kBarred, 0);
}

// A balance: its solution, and the gradient of the scores.
template <Solution (*kSolve)(const at::Tensor&, std::int64_t, Keep),
          at::Tensor (*kGradient)(const at::Tensor&, const Solution&, const at::Tensor&)>
struct BalanceOf : torch::autograd::Function<BalanceOf<kSolve, kGradient>> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& scores,
                            std::int64_t iterations) {
    const Solution solution = kSolve(scores, iterations, Keep::kPotentials);
    variable_list saved{scores, solution.p};
    saved.insert(saved.end(), solution.potentials.begin(), solution.potentials.end());
    context->save_for_backward(std::move(saved));
    return solution.p;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_second_gradient();
    const variable_list saved = context->get_saved_variables();
    const Solution solution{.p = saved[1], .potentials = {saved.begin() + 2, saved.end()}};
    return {kGradient(saved[0], solution, gradients[0]), at::Tensor()};
  }

  static at::Tensor of(const at::Tensor& scores, std::int64_t iterations) {
    return at::GradMode::is_enabled() && scores.requires_grad()
               ? BalanceOf::apply(scores, iterations)
               : kSolve(scores, iterations, Keep::kNothing).p;
  }
};

}  // namespace

Solution solve(const at::Tensor& scores, std::int64_t iterations, Keep keep) {
  Solution solution;
  at::Tensor f = at::zeros_like(scores.narrow(-1, 0, 1)), g;
  for (std::int64_t i = 0; i < iterations; ++i) {
    g = potential(scores + f, -2);
    f = potential(scores + g, -1);
    if (keep == Keep::kPotentials) solution.potentials.insert(solution.potentials.end(), {g, f});
  }
  solution.p = (scores + f).add_(g).exp_();
  return solution;
}

// Runs the steps in reverse. Each flow below is d times the matrix that a step left normalized.
at::Tensor solution_gradient(const at::Tensor& scores, const Solution& solution,
                             const at::Tensor& d_p) {
  const variable_list& potentials = solution.potentials;
  at::Tensor d_scores = d_p * solution.p;
  at::Tensor d_f = d_scores.sum(-1, /*keepdim=*/true);
  at::Tensor d_g = d_scores.sum(-2, /*keepdim=*/true);
  for (std::size_t i = potentials.size(); i >= 2; i -= 2) {
    const at::Tensor &g = potentials[i - 2], &f = potentials[i - 1];
    const at::Tensor row_flow = (scores + f + g).exp_().mul_(d_f);
    d_scores.sub_(row_flow);
    d_g.sub_(row_flow.sum(-2, /*keepdim=*/true));
    const at::Tensor f_before = i > 2 ? potentials[i - 3] : at::zeros_like(f);
    const at::Tensor column_flow = (scores + f_before + g).exp_().mul_(d_g);
    d_scores.sub_(column_flow);
    d_f = column_flow.sum(-1, /*keepdim=*/true).neg_();
    d_g = at::zeros_like(d_g);
  }
  return d_scores;
}

Solution solve_cumulative(const at::Tensor& scores, std::int64_t iterations, Keep keep) {
  Solution solution;
  at::Tensor f = at::zeros_like(scores.narrow(-1, 0, 1)), g;
  const at::Tensor null = at::zeros_like(f);
  for (std::int64_t i = 0; i < iterations; ++i) {
    const at::Tensor log_sum = (scores + f).logcumsumexp(-2);
    g = log_sum.neg().masked_fill_(log_sum == kBarred, 0);
    f = potential(at::cat({scores + g, null}, -1), -1);
    if (keep == Keep::kPotentials) solution.potentials.insert(solution.potentials.end(), {g, f});
  }
  solution.p = (scores + f).add_(g).exp_();
  return solution;
}

at::Tensor cumulative_gradient(const at::Tensor& scores, const Solution& solution,
                               const at::Tensor& d_p) {
  const variable_list& potentials = solution.potentials;
  const std::int64_t N = scores.size(-1);
  at::Tensor d_scores = d_p * solution.p;
  at::Tensor d_f = d_scores.sum(-1, /*keepdim=*/true);
  at::Tensor d_g = d_scores.clone();
  for (std::size_t i = potentials.size(); i >= 2; i -= 2) {
    const at::Tensor &g = potentials[i - 2], &f = potentials[i - 1];
    const at::Tensor row_flow = (scores + f + g).exp_().mul_(d_f);
    d_scores.sub_(row_flow);
    d_g.sub_(row_flow);
    const at::Tensor f_before = i > 2 ? potentials[i - 3] : at::zeros_like(f);
    // Destination u' contributes exp(S_u'v + f_u' + g_uv) to g_uv for each u >= u', so its flow is
    // exp(S_u'v + f_u' + g_u'v) r_u'v, where r_u'v is the sum over u >= u' of exp(g_uv - g_u'v)
    // d_g_uv. g decreases with u, so r_u' = d_g_u' + exp(g_u'+1 - g_u') r_u'+1, evaluated from the
    // last row up, never overflows. Rows above the first finite score of a column have g = 0 by
    // convention, which may be less than g of the next row; the clamp keeps their r finite, and
    // their flow is 0.
    const at::Tensor decay = (g.narrow(-2, 1, N - 1) - g.narrow(-2, 0, N - 1)).clamp_max_(0).exp_();
    at::Tensor r = d_g;
    for (std::int64_t u = N - 2; u >= 0; --u) {
      r.select(-2, u).addcmul_(decay.select(-2, u), r.select(-2, u + 1));
    }
    const at::Tensor column_flow = (scores + f_before + g).exp_().mul_(r);
    d_scores.sub_(column_flow);
    d_f = column_flow.sum(-1, /*keepdim=*/true).neg_();
    d_g = at::zeros_like(d_g);
  }
  return d_scores;
}

at::Tensor reference_balance(const at::Tensor& scores, std::int64_t iterations) {
  return BalanceOf<solve, solution_gradient>::of(scores, iterations);
}

at::Tensor reference_prefix_balance(const at::Tensor& scores, std::int64_t iterations,
                                    std::int64_t first_row) {
  // All prefixes at once: [.., U, N, N], masked outside destinations 1..u and sources 0..u-1.
  const std::int64_t N = scores.size(-1), U = N - first_row;
  const auto indices = scores.options().dtype(at::kLong);
  const at::Tensor u_U = at::arange(first_row, N, indices), index_N = at::arange(N, indices);
  const at::Tensor outside_UNN =
      at::logical_or(index_N.unsqueeze(1) > u_U.view({U, 1, 1}), index_N >= u_U.view({U, 1, 1}))
          .logical_or_(index_N.unsqueeze(1) == 0);
  const at::Tensor prefixes = scores.unsqueeze(-3).masked_fill(outside_UNN, kBarred);
  const at::Tensor p = reference_balance(prefixes, iterations);
  return p.narrow(-2, first_row, U).diagonal(0, -3, -2).transpose(-1, -2);
}

at::Tensor reference_cumulative_balance(const at::Tensor& scores, std::int64_t iterations) {
  return BalanceOf<solve_cumulative, cumulative_gradient>::of(scores, iterations);
}

}  // namespace birkhoff
