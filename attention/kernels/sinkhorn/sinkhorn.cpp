// Legend: S scores, f row potentials, g column potentials, P weights; R rows, C columns, N blocks.
#include "attention/kernels/sinkhorn/sinkhorn.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "attention/kernels/sinkhorn/cpu_sinkhorn.h"
#include "attention/kernels/sinkhorn/gpu_params.h"
#include "cluster/base/error.h"
#include "cluster/base/gpu/device.h"
#include "cluster/base/tensors/second_gradient.h"

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

// Whether a solution must keep its potentials: memory grows with the iterations then.
enum class Keep { kNothing, kPotentials };

Keep kept_for(const at::Tensor& scores) {
  return at::GradMode::is_enabled() && scores.requires_grad() ? Keep::kPotentials : Keep::kNothing;
}

// The operator in the log domain, whatever the range of scores [.., R, C].
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

void save_solution(AutogradContext* context, const at::Tensor& scores, const Solution& solution) {
  variable_list saved = solution.potentials;
  saved.push_back(scores);
  saved.push_back(solution.p);
  context->save_for_backward(saved);
}

std::pair<at::Tensor, Solution> saved_solution(AutogradContext* context) {
  variable_list saved = context->get_saved_variables();
  Solution solution{.p = saved.back(), .potentials = {}};
  saved.pop_back();
  const at::Tensor scores = saved.back();
  saved.pop_back();
  solution.potentials = std::move(saved);
  return {scores, solution};
}

struct Balance : torch::autograd::Function<Balance> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& scores,
                            std::int64_t iterations) {
    const Solution solution = solve(scores, iterations, Keep::kPotentials);
    save_solution(context, scores, solution);
    return solution.p;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_second_gradient();
    const auto [scores, solution] = saved_solution(context);
    return {solution_gradient(scores, solution, gradients[0]), at::Tensor()};
  }
};

// The specification.
at::Tensor reference_balance(const at::Tensor& scores, std::int64_t iterations) {
  const Keep keep = kept_for(scores);
  return keep == Keep::kNothing ? solve(scores, iterations, keep).p
                                : Balance::apply(scores, iterations);
}

// The cumulative operator in the log domain, and of each iteration g and f. g of row u is -log sum
// over destinations u' <= u, so it is a matrix: g_uv.
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
    // Destination u' has a share of exp(S_u'v + f_u' + g_uv) in g_uv for each u >= u', so its
    // flow is exp(S_u'v + f_u' + g_u'v) r_u'v with r_u'v = sum over u >= u' of exp(g_uv - g_u'v)
    // d_g_uv. g falls with u: from the last row up, r_u' = d_g_u' + exp(g_u'+1 - g_u') r_u'+1
    // never overflows. Rows above a column's first source have g = 0 by convention, maybe below
    // the next; the clamp keeps their r finite, and their flow is 0.
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

struct CumulativeBalance : torch::autograd::Function<CumulativeBalance> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& scores,
                            std::int64_t iterations) {
    const Solution solution = solve_cumulative(scores, iterations, Keep::kPotentials);
    save_solution(context, scores, solution);
    return solution.p;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_second_gradient();
    const auto [scores, solution] = saved_solution(context);
    return {cumulative_gradient(scores, solution, gradients[0]), at::Tensor()};
  }
};

// x [.., R, C] with one leading dimension, as a view.
at::Tensor one_batch(const at::Tensor& x) { return x.view({-1, x.size(-2), x.size(-1)}); }

// The fused kernel, and the log domain for the rows beyond its number range.
struct FusedCumulativeBalance : torch::autograd::Function<FusedCumulativeBalance> {
  // Matrices with rows that the kernel left unsolved.
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
// Tensors of a call: S [problems, R, C], P [problems, rows a problem returns, C].
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
    all.push_back(prefix ? Unsolved{problems_K, u + 1, u, result, u, 1, true}
                         : Unsolved{problems_K, R, C, 0, 0, R, false});
  }
  return all;
}

// The fused kernel, and the log domain for the matrices outside its number range. Those are solved
// size by size, and again in the backward pass: what they need besides inputs and outputs is a few
// times S, however many sizes there are.
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

// The kernels of gpu_launch.cu.
struct DeviceBalance : torch::autograd::Function<DeviceBalance> {
  // Memory for what the backward pass keeps of each problem, at one time.
  static constexpr std::int64_t kMostVectors = (128 << 20) / sizeof(float);

  // Problems [.., R, C] as the kernels take them.
  static BalanceParams params(const at::Tensor& scores, std::int64_t iterations, bool prefix,
                              std::int64_t first_row) {
    const std::int64_t R = scores.size(-2), C = scores.size(-1);
    return {.matrices = R * C == 0 ? 0 : scores.numel() / (R * C),
            .rows = static_cast<int>(R),
            .columns = static_cast<int>(C),
            .iterations = static_cast<int>(iterations),
            .prefix = prefix,
            .first_row = static_cast<int>(first_row),
            .results = prefix ? static_cast<int>(R - first_row) : 1,
            .scores = scores.const_data_ptr<float>(),
            .p = nullptr,
            .scratch = nullptr};
  }

  // Puts memory for `matrices` of the problems in place; who calls keeps it.
  static at::Tensor give_scratch(const at::Tensor& scores, std::int64_t matrices,
                                 BalanceParams& problems) {
    const at::Tensor scratch =
        at::empty({matrices * problems.scratch_per_matrix()}, scores.options());
    problems.scratch = scratch.mutable_data_ptr<float>();
    return scratch;
  }

  static bool fits(const at::Tensor& scores, std::int64_t iterations, bool prefix,
                   std::int64_t first_row) {
    return scores.is_cuda() && scores.scalar_type() == at::kFloat &&
           std::max(scores.size(-2), scores.size(-1)) <= BalanceParams::kMostBlocks &&
           BalanceBackwardParams::vectors_per_matrix(
               params(scores, iterations, prefix, first_row)) <= 2 * kMostVectors;
  }

  static at::Tensor forward(AutogradContext* context, const at::Tensor& scores,
                            std::int64_t iterations, bool prefix, std::int64_t first_row) {
    const at::Tensor dense = scores.contiguous();
    const at::Tensor p = at::empty_like(dense.narrow(-2, first_row, dense.size(-2) - first_row),
                                        at::MemoryFormat::Contiguous);
    BalanceParams problems = params(dense, iterations, prefix, first_row);
    problems.p = p.mutable_data_ptr<float>();
    const at::Tensor scratch = give_scratch(dense, problems.matrices, problems);
    if constexpr (kHasGpuKernels) launch_balance(problems, current_stream(dense));
    context->saved_data["iterations"] = iterations;
    context->saved_data["prefix"] = prefix;
    context->saved_data["first_row"] = first_row;
    context->save_for_backward({dense});
    return p;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_second_gradient();
    const at::Tensor scores = context->get_saved_variables()[0], d_p = gradients[0].contiguous();
    const at::Tensor d_scores = at::empty_like(scores);
    BalanceParams problems =
        params(scores, context->saved_data["iterations"].toInt(),
               context->saved_data["prefix"].toBool(), context->saved_data["first_row"].toInt());
    const std::int64_t of_matrix = BalanceBackwardParams::vectors_per_matrix(problems);
    const std::int64_t all = problems.matrices;
    if (all == 0) return {d_scores, at::Tensor(), at::Tensor(), at::Tensor()};
    // Parts of one size, so that each fills the device.
    const std::int64_t most =
        std::max<std::int64_t>(1, kMostVectors / std::max<std::int64_t>(1, of_matrix));
    const std::int64_t parts = (all + most - 1) / most, at_once = (all + parts - 1) / parts;
    const at::Tensor vectors = at::empty({at_once * of_matrix}, scores.options());
    const at::Tensor scratch = give_scratch(scores, at_once, problems);
    const std::int64_t size = scores.size(-2) * scores.size(-1);
    const std::int64_t result_size = d_p.size(-2) * d_p.size(-1);
    for (std::int64_t first = 0; first < all; first += at_once) {
      problems.matrices = std::min(at_once, all - first);
      problems.scores = scores.const_data_ptr<float>() + first * size;
      const BalanceBackwardParams params{
          .problems = problems,
          .d_p = d_p.const_data_ptr<float>() + first * result_size,
          .vectors = vectors.mutable_data_ptr<float>(),
          .d_scores = d_scores.mutable_data_ptr<float>() + first * size};
      if constexpr (kHasGpuKernels) launch_balance_backward(params, current_stream(scores));
    }
    return {d_scores, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

at::Tensor prefix_balance_reference(const at::Tensor& scores, std::int64_t iterations,
                                    std::int64_t first_row) {
  // All prefixes at once: [.., U, N, N], barred outside destinations 1..u and sources 0..u-1.
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

// Row u of each prefix u >= first_row, or the whole matrix.
Path choose_path(const at::Tensor& scores, std::int64_t iterations, bool prefix,
                 std::int64_t first_row, Path limit) {
  if (limit != Path::kFused) return Path::kReference;
  const bool fits = scores.is_cpu() || DeviceBalance::fits(scores, iterations, prefix, first_row);
  return fits ? Path::kFused : Path::kReference;
}

at::Tensor fused_balance(const at::Tensor& scores, std::int64_t iterations, bool prefix,
                         std::int64_t first_row) {
  return scores.is_cpu() ? FusedBalance::apply(scores, iterations, prefix, first_row)
                         : DeviceBalance::apply(scores, iterations, prefix, first_row);
}

}  // namespace

at::Tensor balance(const at::Tensor& scores, std::int64_t iterations, Path limit) {
  require(iterations >= 1, "balance: at least one iteration");
  if (choose_path(scores, iterations, /*prefix=*/false, 0, limit) == Path::kReference) {
    return reference_balance(scores, iterations);
  }
  return fused_balance(scores, iterations, /*prefix=*/false, 0);
}

at::Tensor prefix_balance(const at::Tensor& scores, std::int64_t iterations, std::int64_t first_row,
                          Path limit) {
  require(iterations >= 1, "prefix_balance: at least one iteration");
  if (choose_path(scores, iterations, /*prefix=*/true, first_row, limit) == Path::kReference) {
    return prefix_balance_reference(scores, iterations, first_row);
  }
  return fused_balance(scores, iterations, /*prefix=*/true, first_row);
}

at::Tensor cumulative_balance(const at::Tensor& scores, std::int64_t iterations, Path limit) {
  require(iterations >= 1, "cumulative_balance: at least one iteration");
  if (limit != Path::kFused || !scores.is_cpu()) {
    const Keep keep = kept_for(scores);
    return keep == Keep::kNothing ? solve_cumulative(scores, iterations, keep).p
                                  : CumulativeBalance::apply(scores, iterations);
  }
  return FusedCumulativeBalance::apply(scores, iterations);
}

at::Tensor softmax_with_null(const at::Tensor& scores) {
  const at::Tensor null = at::zeros_like(scores.narrow(-1, 0, 1));
  return at::softmax(at::cat({scores, null}, -1), -1).narrow(-1, 0, scores.size(-1));
}

}  // namespace birkhoff
