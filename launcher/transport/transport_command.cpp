#include <ATen/ATen.h>
#include <fmt/format.h>

#include <ostream>

#include "cluster/base/cpu.h"
#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "cluster/base/text/number_text.h"
#include "cluster/base/text/plural.h"
#include "launcher/commands.h"
#include "launcher/processes/ranks.h"
#include "launcher/runs/text_table.h"
#include "launcher/transport/transport_problem.h"
#include "runtime/reporting/loss_curve.h"

namespace birkhoff {
namespace {

constexpr std::int64_t kMaxShownColumns = 12, kMaxShownRows = 50;

// The plan for a terminal, with its row and column sums.
std::string plan_table(const at::Tensor& p_RC) {
  if (p_RC.size(1) > kMaxShownColumns || p_RC.size(0) > kMaxShownRows) {
    return fmt::format("the plan has {} x {} elements; --plan FILE writes it\n", p_RC.size(0),
                       p_RC.size(1));
  }
  const auto accessor = p_RC.accessor<double, 2>();
  std::vector<TableColumn> columns = {{"", true}};
  std::vector<std::string> sums = {"sum"};
  const auto cell = [](double value) { return fmt::format("{:.6f}", value); };
  std::vector<std::vector<std::string>> rows;
  for (std::int64_t r = 0; r < p_RC.size(0); ++r) {
    rows.push_back({fmt::format("{}", r + 1)});
    for (std::int64_t c = 0; c < p_RC.size(1); ++c) rows.back().push_back(cell(accessor[r][c]));
    rows.back().push_back(cell(p_RC.select(0, r).sum().item<double>()));
  }
  for (std::int64_t c = 0; c < p_RC.size(1); ++c) {
    columns.push_back({fmt::format("{}", c + 1), true});
    sums.push_back(cell(p_RC.select(1, c).sum().item<double>()));
  }
  columns.push_back({"sum", true});
  sums.emplace_back();
  rows.push_back(sums);
  return text_table(columns, rows);
}

// The values at each position of the sorted order: means of the values, weighted by the plan.
std::string sorted_line(const TransportProblem& problem, const TransportPlan& plan) {
  const at::Tensor x_R = at::tensor(*problem.values, at::kDouble);
  const at::Tensor sorted_C = at::mv(plan.p_RC.t(), x_R).contiguous();
  std::string line = "sorted     ";
  for (std::int64_t c = 0; c < sorted_C.numel(); ++c) {
    line += fmt::format(" {:.6g}", sorted_C.const_data_ptr<double>()[c]);
  }
  return line + '\n';
}

std::string plan_file(const at::Tensor& p_RC) {
  std::string text;
  const auto accessor = p_RC.accessor<double, 2>();
  for (std::int64_t r = 0; r < p_RC.size(0); ++r) {
    for (std::int64_t c = 0; c < p_RC.size(1); ++c) {
      text += (c > 0 ? "\t" : "") + plain_text(accessor[r][c]);
    }
    text += '\n';
  }
  return text;
}

// The errors of the sums by iteration; those of 0 have no logarithm.
PlotLine error_line(const std::vector<double>& errors, std::string name, int colour) {
  Curve curve;
  for (std::size_t i = 0; i < errors.size(); ++i) {
    if (errors[i] > 0) curve.add(static_cast<std::int64_t>(i) + 1, errors[i]);
  }
  PlotLine line{.name = std::move(name), .points = {}, .colour = colour};
  for (const Curve::Point& point : curve.points()) line.points.emplace_back(point.step, point.loss);
  return line;
}

std::string picture_of(const TransportPlan& plan) {
  return plot_svg(
      {.title = "Largest error of a sum, as a share of the total mass",
       .x = {"iteration"},
       .y = {"error", AxisScale::kLog10},
       .lines = {error_line(plan.source_errors, "sources, after a step for targets", 0),
                 error_line(plan.target_errors, "targets, after a step for sources", 1)}});
}

}  // namespace

int transport_command(const TransportArguments& arguments, std::ostream& out) {
  compute_on_cpu(threads_of_rank(usable_cores()));
  TransportProblem problem = transport_problem(arguments);
  problem.transport.regularization = arguments.regularization;
  problem.transport.tolerance = arguments.tolerance;
  problem.transport.max_iterations = arguments.max_iterations;
  problem.transport.scales = arguments.scales;
  const TransportPlan plan = solve_transport(problem.transport);
  if (!arguments.plan.empty()) write_file_durably(arguments.plan, plan_file(plan.p_RC));
  if (!arguments.svg.empty()) write_file_durably(arguments.svg, picture_of(plan));
  out << "plan (rows: sources, columns: targets)\n"
      << plan_table(plan.p_RC) << '\n'
      << (problem.values ? sorted_line(problem, plan) : "")
      << fmt::format(
             "cost        {:.6f}\nerrors      {:.3g} of the source sums, {:.3g} of the target sums, "
             "as shares of the total mass\niterations  {}\n",
             plan.cost, plan.source_error, plan.target_error, plan.iterations);
  if (plan.converged) return 0;
  fail(ExitCode::kNumerical,
       "transport stopped after {} with an error of {:.3g}, above --tolerance {}; raise "
       "--iterations, --reg or --tolerance{}",
       counted(plan.iterations, "iteration"), plan.source_error, arguments.tolerance,
       arguments.scales ? "" : ", or add --eps-scaling");
}

}  // namespace birkhoff
