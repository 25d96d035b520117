// Legend: R sources, C targets; S = -M / reg scores, f and g potentials.
#include "attention/kernels/transport/transport.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "cluster/base/error.h"

namespace birkhoff {
namespace {

// Regularizations before the last one only prepare its start.
constexpr double kRoughTolerance = 1e-2;
// Totals of decimal fractions differ by rounding.
constexpr double kTotalTolerance = 1e-9;
// The largest score: rounding leaves it three digits behind the decimal point.
constexpr double kMaxScore = 1e12;

void check_options(const Transport& problem) {
  for (const auto& [name, value] :
       {std::pair{"regularization", problem.regularization}, {"tolerance", problem.tolerance}}) {
    if (value > 0 && std::isfinite(value)) continue;
    fail(ExitCode::kUsage, "the {} is {}; it must be finite and above 0", name, value);
  }
  require(problem.max_iterations > 0, "solve_transport: at least one iteration");
}

double total_of(const at::Tensor& masses) { return masses.sum(at::kDouble).item<double>(); }

// The masses as shares of their total.
at::Tensor shares(const at::Tensor& masses, const char* role) {
  const at::Tensor dense = masses.to(at::kCPU, at::kDouble).contiguous();
  const double* values = dense.const_data_ptr<double>();
  for (std::int64_t i = 0; i < dense.numel(); ++i) {
    if (std::isfinite(values[i]) && values[i] >= 0) continue;
    fail(ExitCode::kData, "{} mass {} of {} is {}; a mass is finite and at least 0", role, i + 1,
         dense.numel(), values[i]);
  }
  const double total = total_of(dense);
  if (!(total > 0) || !std::isfinite(total)) {
    fail(ExitCode::kData, "the total of the {} masses is {}; it must be finite and above 0", role,
         total);
  }
  return dense / total;
}

void check_totals(const Transport& problem) {
  const double source = total_of(problem.source_R), target = total_of(problem.target_C);
  if (std::abs(source - target) <= kTotalTolerance * std::max(source, target)) return;
  fail(ExitCode::kData,
       "the source masses add up to {} and the target masses to {}; no plan has both: scale one of "
       "them",
       source, target);
}

// The costs less the smallest one, which changes no plan.
at::Tensor checked_costs(const Transport& problem) {
  const at::Tensor cost_RC = problem.cost_RC.to(at::kCPU, at::kDouble).contiguous();
  require(cost_RC.dim() == 2 && cost_RC.size(0) == problem.source_R.numel() &&
              cost_RC.size(1) == problem.target_C.numel() && cost_RC.numel() > 0,
          "solve_transport: one mass for each row and column");
  const double* values = cost_RC.const_data_ptr<double>();
  for (std::int64_t i = 0; i < cost_RC.numel(); ++i) {
    if (std::isfinite(values[i])) continue;
    fail(ExitCode::kData, "the cost from source {} to target {} is {}; costs are finite",
         i / cost_RC.size(1) + 1, i % cost_RC.size(1) + 1, values[i]);
  }
  const at::Tensor above_RC = cost_RC - cost_RC.min();
  const double range = above_RC.max().item<double>();
  if (!(range / problem.regularization <= kMaxScore)) {
    fail(
        ExitCode::kUsage,
        "costs differ by up to {}, more than {:g} times the regularization {}, which fp64 does not "
        "resolve; use a larger regularization",
        range, kMaxScore, problem.regularization);
  }
  return above_RC;
}

// From the largest to problem.regularization.
std::vector<double> regularizations(const Transport& problem, double range) {
  std::vector<double> all{problem.regularization};
  while (problem.scales && all.back() * 2 <= range) all.push_back(all.back() * 2);
  std::reverse(all.begin(), all.end());
  return all;
}

double largest_difference(const at::Tensor& log_sums, const at::Tensor& wanted) {
  return (log_sums.exp() - wanted).abs_().max().item<double>();
}

}  // namespace

TransportPlan solve_transport(const Transport& problem) {
  check_options(problem);
  const at::Tensor a_R = shares(problem.source_R, "source"),
                   b_C = shares(problem.target_C, "target"), cost_RC = checked_costs(problem);
  check_totals(problem);
  const at::Tensor log_a_R = a_R.log(), log_b_C = b_C.log();

  TransportPlan plan;
  at::Tensor scores_RC, f_R = at::zeros_like(a_R), g_C = at::zeros_like(b_C);
  for (const double regularization : regularizations(problem, cost_RC.max().item<double>())) {
    const bool last = regularization == problem.regularization;
    const double tolerance =
        last ? problem.tolerance : std::max(problem.tolerance, kRoughTolerance);
    if (scores_RC.defined()) {  // potentials are in units of the regularization, which is halved
      f_R = f_R * 2;
      g_C = g_C * 2;
    }
    scores_RC = cost_RC / -regularization;
    plan.converged = false;
    at::Tensor rows_R = (scores_RC + g_C).logsumexp(1);
    while (!plan.converged && plan.iterations < problem.max_iterations) {
      f_R = log_a_R - rows_R;
      const at::Tensor columns_C = (scores_RC + f_R.unsqueeze(1)).logsumexp(0);
      plan.target_errors.push_back(largest_difference(columns_C + g_C, b_C));
      g_C = log_b_C - columns_C;
      rows_R = (scores_RC + g_C).logsumexp(1);
      plan.source_errors.push_back(largest_difference(rows_R + f_R, a_R));
      ++plan.iterations;
      plan.converged = plan.source_errors.back() <= tolerance;
    }
    if (!plan.converged) break;
  }
  const at::Tensor p_RC = (scores_RC + f_R.unsqueeze(1)).add_(g_C).exp_();
  plan.source_error = (p_RC.sum(1) - a_R).abs_().max().item<double>();
  plan.target_error = (p_RC.sum(0) - b_C).abs_().max().item<double>();
  plan.p_RC = p_RC * total_of(problem.source_R);
  plan.cost = (plan.p_RC * problem.cost_RC.to(at::kCPU, at::kDouble)).sum().item<double>();
  return plan;
}

}  // namespace birkhoff
