// Legend: S scores, f row potentials, g column potentials, P weights; R rows, C columns, N blocks.
#include "attention/balance.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <limits>

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

// The operator in the log domain. Saves S and the potentials of each step, no matrix per iteration.
struct Balance : torch::autograd::Function<Balance> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& scores,
                            std::int64_t iterations) {
    variable_list saved{scores};
    at::Tensor f = at::zeros_like(scores.narrow(-1, 0, 1)), g;
    for (std::int64_t i = 0; i < iterations; ++i) {
      g = potential(scores + f, -2);
      f = potential(scores + g, -1);
      saved.push_back(g);
      saved.push_back(f);
    }
    at::Tensor p = (scores + f).add_(g).exp_();
    saved.push_back(p);
    context->save_for_backward(saved);
    return p;
  }

  // Reverse of the steps: W below are the matrices that a step left normalised.
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor& scores = saved.front();
    at::Tensor d_scores = gradients[0] * saved.back();
    at::Tensor d_f = d_scores.sum(-1, /*keepdim=*/true);
    at::Tensor d_g = d_scores.sum(-2, /*keepdim=*/true);
    for (std::size_t i = saved.size() - 2; i >= 2; i -= 2) {  // saved[i - 1], saved[i]: g, f
      const at::Tensor row_flow = (scores + saved[i] + saved[i - 1]).exp_().mul_(d_f);
      d_scores.sub_(row_flow);
      d_g.sub_(row_flow.sum(-2, /*keepdim=*/true));
      const at::Tensor f_before = i > 2 ? saved[i - 2] : at::zeros_like(saved[i]);
      const at::Tensor column_flow = (scores + f_before + saved[i - 1]).exp_().mul_(d_g);
      d_scores.sub_(column_flow);
      d_f = column_flow.sum(-1, /*keepdim=*/true).neg_();
      d_g = at::zeros_like(d_g);
    }
    return {d_scores, at::Tensor()};
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
    const at::Tensor not_yet_NN1 = at::ones({N, N}, at::kBool).triu(1).unsqueeze(-1);  // u' > u
    at::Tensor d_scores = gradients[0] * saved.back();
    at::Tensor d_f = d_scores.sum(-1, /*keepdim=*/true);
    at::Tensor d_g = d_scores.clone();
    for (std::size_t i = saved.size() - 2; i >= 2; i -= 2) {
      const at::Tensor row_flow = (scores + saved[i] + saved[i - 1]).exp_().mul_(d_f);
      d_scores.sub_(row_flow);
      d_g.sub_(row_flow);
      const at::Tensor f_before = i > 2 ? saved[i - 2] : at::zeros_like(saved[i]);
      // [.., u, u', v]: the share of destination u' in the sum that made g_uv.
      const at::Tensor column_flow =
          ((scores + f_before).unsqueeze(-3) + saved[i - 1].unsqueeze(-2))
              .masked_fill_(not_yet_NN1, kBarred)
              .exp_()
              .mul_(d_g.unsqueeze(-2))
              .sum(-3);
      d_scores.sub_(column_flow);
      d_f = column_flow.sum(-1, /*keepdim=*/true).neg_();
      d_g = at::zeros_like(d_g);
    }
    return {d_scores, at::Tensor()};
  }
};

// The fused kernel; its second output says which problems it could not solve in its number range.
struct FusedBalance : torch::autograd::Function<FusedBalance> {
  static variable_list forward(AutogradContext* context, const at::Tensor& scores,
                               std::int64_t iterations, bool prefix, std::int64_t first_row) {
    context->saved_data["iterations"] = iterations;
    context->saved_data["prefix"] = prefix;
    context->saved_data["first_row"] = first_row;
    const at::Tensor dense = scores.contiguous();
    context->save_for_backward({dense});
    auto [p, solved] = prefix ? prefix_balance_kernel(dense, iterations, first_row)
                              : balance_kernel(dense, iterations);
    context->mark_non_differentiable({solved});
    return {p, solved};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const at::Tensor scores = context->get_saved_variables()[0];
    const std::int64_t iterations = context->saved_data["iterations"].toInt();
    const at::Tensor d_p = gradients[0].contiguous();
    const at::Tensor d_scores =
        context->saved_data["prefix"].toBool()
            ? prefix_balance_kernel_backward(scores, d_p, iterations,
                                             context->saved_data["first_row"].toInt())
            : balance_kernel_backward(scores, d_p, iterations);
    return {d_scores, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

at::Tensor prefix_balance_reference(const at::Tensor& scores, std::int64_t iterations,
                                    std::int64_t first_row) {
  // All prefixes at once: [.., U, N, N], barred outside destinations 0..u and sources 0..u-1.
  const std::int64_t N = scores.size(-1), U = N - first_row;
  const at::Tensor u_U = at::arange(first_row, N), index_N = at::arange(N);
  const at::Tensor outside_UNN =
      at::logical_or(index_N.unsqueeze(1) > u_U.view({U, 1, 1}), index_N >= u_U.view({U, 1, 1}));
  const at::Tensor prefixes = scores.unsqueeze(-3).masked_fill(outside_UNN, kBarred);
  const at::Tensor p = Balance::apply(prefixes, iterations);
  return p.narrow(-2, first_row, U).diagonal(0, -3, -2).transpose(-1, -2);
}

}  // namespace

at::Tensor balance(const at::Tensor& scores, std::int64_t iterations, BalancePath path) {
  require(iterations >= 1, "balance: at least one iteration");
  if (path == BalancePath::kReference || !scores.device().is_cpu()) {
    return Balance::apply(scores, iterations);
  }
  const variable_list fused = FusedBalance::apply(scores, iterations, false, 0);
  if (fused[1].all().item<bool>()) return fused[0];
  return at::where(fused[1], fused[0], Balance::apply(scores, iterations));
}

at::Tensor prefix_balance(const at::Tensor& scores, std::int64_t iterations, std::int64_t first_row,
                          BalancePath path) {
  require(iterations >= 1, "prefix_balance: at least one iteration");
  if (path == BalancePath::kReference || !scores.device().is_cpu()) {
    return prefix_balance_reference(scores, iterations, first_row);
  }
  const variable_list fused = FusedBalance::apply(scores, iterations, true, first_row);
  if (fused[1].all().item<bool>()) return fused[0];
  return at::where(fused[1], fused[0], prefix_balance_reference(scores, iterations, first_row));
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
