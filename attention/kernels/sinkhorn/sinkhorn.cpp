// Legend: S scores, f row potentials, g column potentials, P weights; R rows, C columns, N blocks.
#include "attention/kernels/sinkhorn/sinkhorn.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "attention/kernels/sinkhorn/cpu_sinkhorn.h"
#include "attention/kernels/sinkhorn/gpu_arguments.h"
#include "attention/kernels/sinkhorn/log_domain.h"
#include "cluster/base/error.h"
#include "cluster/base/tensors/second_gradient.h"

namespace birkhoff {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// x [.., R, C] with one leading dimension, as a view.
at::Tensor one_batch(const at::Tensor& x) { return x.view({-1, x.size(-2), x.size(-1)}); }

// The fused kernel; rows outside its number range are solved in the log domain.
struct FusedCumulativeBalance : torch::autograd::Function<FusedCumulativeBalance> {
  // The indices of matrices with rows that the kernel left unsolved.
  static at::Tensor unsolved(const at::Tensor& solved) {
    return one_batch(solved).logical_not().flatten(1).any(1).nonzero().squeeze(1);
  }

  static at::Tensor forward(AutogradContext* context, const at::Tensor& scores,
                            std::int64_t iterations) {
    const at::Tensor dense = scores.contiguous();
    const auto [p, solved] = cumulative_balance_kernel(dense, iterations);
    const at::Tensor problems_K = unsolved(solved);
    if (problems_K.size(0) > 0) {
      const auto part = [&](const at::Tensor& x) {
        return one_batch(x).index_select(0, problems_K);
      };
      const Solution solution = solve_cumulative(part(dense), iterations, Keep::kNothing);
      one_batch(p).index_copy_(0, problems_K, at::where(part(solved), part(p), solution.p));
    }
    context->saved_data["iterations"] = iterations;
    context->save_for_backward({dense, solved});
    return p;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_second_gradient();
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &scores = saved[0], &solved = saved[1];
    const std::int64_t iterations = context->saved_data["iterations"].toInt();
    const at::Tensor d_p = gradients[0].contiguous();
    const at::Tensor d_scores = cumulative_balance_kernel_backward(scores, d_p, iterations);
    const at::Tensor problems_K = unsolved(solved);
    if (problems_K.size(0) > 0) {
      const auto part = [&](const at::Tensor& x) {
        return one_batch(x).index_select(0, problems_K);
      };
      const at::Tensor rest = part(scores);
      one_batch(d_scores).index_add_(
          0, problems_K,
          cumulative_gradient(rest, solve_cumulative(rest, iterations, Keep::kPotentials),
                              part(d_p).masked_fill_(part(solved), 0)));
    }
    return {d_scores, at::Tensor()};
  }
};

// Matrices of one size that the kernel left unsolved, and the rows of each that the call returns.
// The tensors of a call are S [problems, R, C] and P [problems, rows that a problem returns, C].
struct Unsolved {
  at::Tensor problems_K;
  std::int64_t rows, columns;  // the leading part of S that is balanced
  std::int64_t first_result, first_row, num_rows;
  bool prefix;

  // [K, rows, columns], a copy.
  at::Tensor part(const at::Tensor& s) const {
    const at::Tensor copy = s.narrow(1, 0, rows).narrow(2, 0, columns).index_select(0, problems_K);
    if (prefix) copy.select(1, 0).fill_(kBarred);
    return copy;
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

// Groups the problems that the kernel left unsolved. `solved` is [problems] for whole matrices and
// [problems, U] for prefixes, where each row u is a matrix of its own.
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
    all.push_back(prefix ? Unsolved{problems_K, u + 1, u, result, u, 1, true}
                         : Unsolved{problems_K, R, C, 0, 0, R, false});
  }
  return all;
}

// The fused kernel; matrices outside its number range are solved in the log domain. They are solved
// one size at a time, and again in the backward pass: extra memory is a few copies of S, however
// many sizes there are.
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
    refuse_second_gradient();
    const variable_list saved = context->get_saved_variables();
    const auto& data = context->saved_data;
    return {fused_balance_backward(gradients[0], saved[0], saved[1], data.at("iterations").toInt(),
                                   data.at("prefix").toBool(), data.at("first_row").toInt()),
            at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

std::pair<at::Tensor, at::Tensor> fused_balance_forward(const at::Tensor& scores,
                                                        std::int64_t iterations, bool prefix,
                                                        std::int64_t first_row) {
  const at::Tensor dense = scores.contiguous();
  const auto [p, solved] = prefix ? prefix_balance_kernel(dense, iterations, first_row)
                                  : balance_kernel(dense, iterations);
  for (const Unsolved& group : unsolved(solved, dense, prefix, first_row)) {
    const Solution solution = solve(group.part(one_batch(dense)), iterations, Keep::kNothing);
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
    group.add_to_part(
        one_batch(d_scores),
        solution_gradient(part, solve(part, iterations, Keep::kPotentials), d_part_p));
  }
  return d_scores;
}

namespace {

constexpr char kOperation[] = "balance";  // in records of paths

Path balance_path(const at::Tensor& scores, std::int64_t iterations, BalanceKind kind,
                  std::int64_t first_row, Path limit) {
  if (limit != Path::kFused) return Path::kReference;
  return take_path(kOperation,
                   fused_unless(why_not_fused(
                       scores, [] { return std::string(); },
                       [&] { return why_not_gpu_kernels(scores, iterations, kind, first_row); })));
}

}  // namespace

at::Tensor balance(const at::Tensor& scores, std::int64_t iterations, Path limit) {
  require(iterations >= 1, "balance: at least one iteration");
  constexpr BalanceKind kKind = BalanceKind::kWhole;
  if (balance_path(scores, iterations, kKind, 0, limit) == Path::kReference) {
    return reference_balance(scores, iterations);
  }
  return scores.is_cpu() ? FusedBalance::apply(scores, iterations, /*prefix=*/false, 0)
                         : balance_on_gpu(scores, iterations, kKind, 0);
}

BalancedWeights balance_and_round(const at::Tensor& scores, std::int64_t iterations,
                                  at::ScalarType dtype, Path limit) {
  require(iterations >= 1, "balance_and_round: at least one iteration");
  const bool rounds =
      !scores.is_cpu() && (dtype == at::kBFloat16 || dtype == at::kHalf) &&
      balance_path(scores, iterations, BalanceKind::kWhole, 0, limit) == Path::kFused;
  if (rounds) return balance_and_round_on_gpu(scores, iterations, dtype);
  return {balance(scores, iterations, limit)};
}

at::Tensor prefix_balance(const at::Tensor& scores, std::int64_t iterations, std::int64_t first_row,
                          Path limit) {
  require(iterations >= 1, "prefix_balance: at least one iteration");
  constexpr BalanceKind kKind = BalanceKind::kPrefix;
  if (balance_path(scores, iterations, kKind, first_row, limit) == Path::kReference) {
    return reference_prefix_balance(scores, iterations, first_row);
  }
  return scores.is_cpu() ? FusedBalance::apply(scores, iterations, /*prefix=*/true, first_row)
                         : balance_on_gpu(scores, iterations, kKind, first_row);
}

at::Tensor cumulative_balance(const at::Tensor& scores, std::int64_t iterations, Path limit) {
  require(iterations >= 1, "cumulative_balance: at least one iteration");
  constexpr BalanceKind kKind = BalanceKind::kCumulative;
  if (balance_path(scores, iterations, kKind, 0, limit) == Path::kReference) {
    return reference_cumulative_balance(scores, iterations);
  }
  return scores.is_cpu() ? FusedCumulativeBalance::apply(scores, iterations)
                         : balance_on_gpu(scores, iterations, kKind, 0);
}

at::Tensor softmax_with_null(const at::Tensor& scores) {
  const at::Tensor null = at::zeros_like(scores.narrow(-1, 0, 1));
  return at::softmax(at::cat({scores, null}, -1), -1).narrow(-1, 0, scores.size(-1));
}

}  // namespace birkhoff
