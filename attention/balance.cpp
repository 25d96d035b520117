// Legend: S scores, f row potentials, g column potentials, P weights; R rows, C columns, N blocks.
#include "attention/balance.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <limits>
#include <utility>
#include <vector>

#include "attention/balance_kernel.h"
#include "cluster/base/error.h"

namespace birkhoff {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr double kBarred = -std::numeric_limits<double>::infinity();

// -log sum exp(x) over `dim`, kept; 0 where every entry is -inf, so that no potential is infinite.
at::Tensor potential(const at::Tensor& x, std::int64_t dim) {
  const at::Tensor max = x.amax(dim, /*keepdim=*/true);
  const at::Tensor shift = max.masked_fill(max == kBarred, 0);
  const at::Tensor log_sum = (x - shift).exp_().sum(dim, /*keepdim=*/true).log_().add_(shift);
  return log_sum.neg_().masked_fill_(max == kBarred, 0);
}

// P and the potentials that made it: of each iteration its column step's g, then its row step's f.
// They are all that the gradient needs, no matrix per iteration.
struct Solution {
  at::Tensor p;
  variable_list potentials;
};

// The operator in the log domain, whatever the range of scores [.., R, C].
Solution solve(const at::Tensor& scores, std::int64_t iterations) {
  Solution solution;
  at::Tensor f = at::zeros_like(scores.narrow(-1, 0, 1)), g;
  for (std::int64_t i = 0; i < iterations; ++i) {
    g = potential(scores + f, -2);
    f = potential(scores + g, -1);
    solution.potentials.push_back(g);
    solution.potentials.push_back(f);
  }
  solution.p = (scores + f).add_(g).exp_();
  return solution;
}

// dLoss/dS given d_p = dLoss/dP. Reverse of the steps: each flow below is d times the matrix that a
// step left normalised.
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

struct Balance : torch::autograd::Function<Balance> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& scores,
                            std::int64_t iterations) {
    const Solution solution = solve(scores, iterations);
    variable_list saved = solution.potentials;
    saved.push_back(scores);
    saved.push_back(solution.p);
    context->save_for_backward(saved);
    return solution.p;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    variable_list saved = context->get_saved_variables();
    Solution solution{.p = saved.back(), .potentials = {}};
    saved.pop_back();
    const at::Tensor scores = saved.back();
    saved.pop_back();
    solution.potentials = std::move(saved);
    return {solution_gradient(scores, solution, gradients[0]), at::Tensor()};
  }
};

// g of row u is -log sum over destinations u' <= u, so it is a matrix: g_uv.
struct CumulativeBalance : torch::autograd::Function<CumulativeBalance> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& scores,
                            std::int64_t iterations) {
    variable_list saved{scores};
    at::Tensor f = at::zeros_like(scores.narrow(-1, 0, 1)), g = at::zeros_like(scores);
    const at::Tensor null = at::zeros_like(f);
    for (std::int64_t i = 0; i < iterations; ++i) {
      const at::Tensor log_sum = (scores + f).logcumsumexp(-2);
      g = log_sum.neg().masked_fill_(log_sum == kBarred, 0);
      f = potential(at::cat({scores + g, null}, -1), -1);
      saved.push_back(g);
      saved.push_back(f);
    }
    at::Tensor p = (scores + f).add_(g).exp_();
    saved.push_back(p);
    context->save_for_backward(saved);
    return p;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor& scores = saved.front();
    const std::int64_t N = scores.size(-1);
    at::Tensor d_scores = gradients[0] * saved.back();
    at::Tensor d_f = d_scores.sum(-1, /*keepdim=*/true);
    at::Tensor d_g = d_scores.clone();
    for (std::size_t i = saved.size() - 2; i >= 2; i -= 2) {
      const at::Tensor row_flow = (scores + saved[i] + saved[i - 1]).exp_().mul_(d_f);
      d_scores.sub_(row_flow);
      d_g.sub_(row_flow);
      const at::Tensor f_before = i > 2 ? saved[i - 2] : at::zeros_like(saved[i]);
      // Destination u' has a share of exp(S_u'v + f_u' + g_uv) in g_uv for each u >= u', so its
      // flow is exp(S_u'v + f_u' + g_u'v) r_u'v with r_u'v = sum over u >= u' of exp(g_uv - g_u'v)
      // d_g_uv. g falls with u: from the last row up, r_u' = d_g_u' + exp(g_u'+1 - g_u') r_u'+1
      // never overflows. Rows above a column's first source have g = 0 by convention, maybe below
      // the next; the clamp keeps their r finite, and their flow is 0.
      const at::Tensor& g = saved[i - 1];
      const at::Tensor decay =
          (g.narrow(-2, 1, N - 1) - g.narrow(-2, 0, N - 1)).clamp_max_(0).exp_();
      at::Tensor r = d_g;
      for (std::int64_t u = N - 2; u >= 0; --u) {
        r.select(-2, u).addcmul_(decay.select(-2, u), r.select(-2, u + 1));
      }
      const at::Tensor column_flow = (scores + f_before + g).exp_().mul_(r);
      d_scores.sub_(column_flow);
      d_f = column_flow.sum(-1, /*keepdim=*/true).neg_();
      d_g = at::zeros_like(d_g);
    }
    return {d_scores, at::Tensor()};
  }
};

// Matrices of one size that the kernel left unsolved, and the rows of each that the call returns.
// Tensors of a call: S [problems, R, C], P [problems, rows a problem returns, C].
struct Unsolved {
  at::Tensor problems_K;
  std::int64_t rows, columns;  // the leading part of S that is balanced
  std::int64_t first_result, first_row, num_rows;

  // [K, rows, columns], a copy.
  at::Tensor part(const at::Tensor& s) const {
    return s.narrow(1, 0, rows).narrow(2, 0, columns).index_select(0, problems_K);
  }
  void add_to_part(const at::Tensor& s, const at::Tensor& part) const {
    s.narrow(1, 0, rows).narrow(2, 0, columns).index_add_(0, problems_K, part);
  }
  at::Tensor result_rows(const at::Tensor& part) const {
    return part.narrow(1, first_row, num_rows);
  }
  at::Tensor result(const at::Tensor& p) const {
    return p.narrow(1, first_result, num_rows).narrow(2, 0, columns);
  }
};

// What the kernel left unsolved: `solved` is [problems] for whole matrices and [problems, U] for
// prefixes, whose row u is a matrix of its own.
std::vector<Unsolved> unsolved(const at::Tensor& solved, const at::Tensor& scores, bool prefix,
                               std::int64_t first_row) {
  std::vector<Unsolved> all;
  if (solved.all().item<bool>()) return all;
  const std::int64_t R = scores.size(-2), C = scores.size(-1);
  const std::int64_t num_results = prefix ? R - first_row : 1;
  const at::Tensor missing = solved.view({-1, num_results}).logical_not();
  for (std::int64_t result = 0; result < num_results; ++result) {
    const at::Tensor problems_K = missing.select(1, result).nonzero().squeeze(1);
    if (problems_K.size(0) == 0) continue;
    const std::int64_t u = first_row + result;
    all.push_back(prefix ? Unsolved{problems_K, u + 1, u, result, u, 1}
                         : Unsolved{problems_K, R, C, 0, 0, R});
  }
  return all;
}

// x [.., R, C] with one leading dimension, as a view.
at::Tensor one_batch(const at::Tensor& x) { return x.view({-1, x.size(-2), x.size(-1)}); }

struct FusedBalance : torch::autograd::Function<FusedBalance> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& scores,
                            std::int64_t iterations, bool prefix, std::int64_t first_row) {
    context->saved_data["iterations"] = iterations;
    context->saved_data["prefix"] = prefix;
    context->saved_data["first_row"] = first_row;
    const at::Tensor dense = scores.contiguous();
    auto [p, solved] = fused_balance_forward(dense, iterations, prefix, first_row);
    context->save_for_backward({dense, solved});
    return p;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const auto& data = context->saved_data;
    return {fused_balance_backward(gradients[0], saved[0], saved[1], data.at("iterations").toInt(),
                                   data.at("prefix").toBool(), data.at("first_row").toInt()),
            at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

at::Tensor prefix_balance_reference(const at::Tensor& scores, std::int64_t iterations,
                                    std::int64_t first_row) {
  // All prefixes at once: [.., U, N, N], barred outside destinations 0..u and sources 0..u-1.
  const std::int64_t N = scores.size(-1), U = N - first_row;
  const auto indices = scores.options().dtype(at::kLong);
  const at::Tensor u_U = at::arange(first_row, N, indices), index_N = at::arange(N, indices);
  const at::Tensor outside_UNN =
      at::logical_or(index_N.unsqueeze(1) > u_U.view({U, 1, 1}), index_N >= u_U.view({U, 1, 1}));
  const at::Tensor prefixes = scores.unsqueeze(-3).masked_fill(outside_UNN, kBarred);
  const at::Tensor p = Balance::apply(prefixes, iterations);
  return p.narrow(-2, first_row, U).diagonal(0, -3, -2).transpose(-1, -2);
}

}  // namespace

std::pair<at::Tensor, at::Tensor> fused_balance_forward(const at::Tensor& scores,
                                                        std::int64_t iterations, bool prefix,
                                                        std::int64_t first_row) {
  const at::Tensor dense = scores.contiguous();
  const auto [p, solved] = prefix ? prefix_balance_kernel(dense, iterations, first_row)
                                  : balance_kernel(dense, iterations);
  for (const Unsolved& group : unsolved(solved, dense, prefix, first_row)) {
    const Solution solution = solve(group.part(one_batch(dense)), iterations);
    group.result(one_batch(p)).index_copy_(0, group.problems_K, group.result_rows(solution.p));
  }
  return {p, solved};
}

at::Tensor fused_balance_backward(const at::Tensor& d_p, const at::Tensor& scores,
                                  const at::Tensor& solved, std::int64_t iterations, bool prefix,
                                  std::int64_t first_row) {
  const at::Tensor dense = scores.contiguous(), dense_d_p = d_p.contiguous();
  const at::Tensor d_scores =
      prefix ? prefix_balance_kernel_backward(dense, dense_d_p, iterations, first_row)
             : balance_kernel_backward(dense, dense_d_p, iterations);
  for (const Unsolved& group : unsolved(solved, dense, prefix, first_row)) {
    const at::Tensor part = group.part(one_batch(dense));
    const at::Tensor d_part_p = at::zeros_like(part);
    group.result_rows(d_part_p).copy_(
        group.result(one_batch(dense_d_p)).index_select(0, group.problems_K));
    group.add_to_part(one_batch(d_scores),
                      solution_gradient(part, solve(part, iterations), d_part_p));
  }
  return d_scores;
}

at::Tensor balance(const at::Tensor& scores, std::int64_t iterations, BalancePath path) {
  require(iterations >= 1, "balance: at least one iteration");
  if (path == BalancePath::kReference || !scores.device().is_cpu()) {
    return Balance::apply(scores, iterations);
  }
  return FusedBalance::apply(scores, iterations, /*prefix=*/false, /*first_row=*/0);
}

at::Tensor prefix_balance(const at::Tensor& scores, std::int64_t iterations, std::int64_t first_row,
                          BalancePath path) {
  require(iterations >= 1, "prefix_balance: at least one iteration");
  if (path == BalancePath::kReference || !scores.device().is_cpu()) {
    return prefix_balance_reference(scores, iterations, first_row);
  }
  return FusedBalance::apply(scores, iterations, /*prefix=*/true, first_row);
}

at::Tensor cumulative_balance(const at::Tensor& scores, std::int64_t iterations) {
  require(iterations >= 1, "cumulative_balance: at least one iteration");
  return CumulativeBalance::apply(scores, iterations);
}

at::Tensor softmax_with_null(const at::Tensor& scores) {
  const at::Tensor null = at::zeros_like(scores.narrow(-1, 0, 1));
  return at::softmax(at::cat({scores, null}, -1), -1).narrow(-1, 0, scores.size(-1));
}

}  // namespace birkhoff
