#include "runtime/reporting/loss_curve.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace birkhoff {
namespace {

// For the legend: the name with the newest loss, if there is one.
std::string name_and_loss(const std::string& name, const Curve& curve) {
  const auto points = curve.points();
  return points.empty() ? name : fmt::format("{} {:.4f}", name, points.back().loss);
}

}  // namespace

void Curve::add(std::int64_t step, double loss) {
  if (!std::isfinite(loss)) return;
  newest_ = {static_cast<double>(step), loss};
  if (num_added_++ % stride_ == 0) kept_.push_back(newest_);
  if (kept_.size() < kMaxPoints) return;
  for (std::size_t i = 0; 2 * i < kept_.size(); ++i) kept_[i] = kept_[2 * i];
  kept_.resize((kept_.size() + 1) / 2);
  stride_ *= 2;
}

std::vector<Curve::Point> Curve::points() const {
  std::vector<Point> all = kept_;
  if (!all.empty() && all.back().step != newest_.step) all.push_back(newest_);
  return all;
}

PlotLine curve_line(const Curve& curve, bool held_out, std::string name, int colour) {
  PlotLine line{.name = std::move(name),
                .points = {},
                .colour = colour,
                .faint = !held_out,
                .marked = held_out};
  for (const Curve::Point& point : curve.points()) line.points.emplace_back(point.step, point.loss);
  return line;
}

Plot loss_plot(std::string title, std::vector<PlotLine> lines) {
  double low = std::numeric_limits<double>::infinity(), high = 0;
  for (const PlotLine& line : lines) {
    for (const auto& [step, loss] : line.points) {
      low = std::min(low, loss);
      high = std::max(high, loss);
    }
  }
  const bool logarithmic = low > 0 && high >= 10 * low;
  return {std::move(title),
          {"step"},
          {"loss (nats)", logarithmic ? AxisScale::kLog10 : AxisScale::kLinear},
          std::move(lines)};
}

std::string loss_curve_svg(const std::string& run_name, const Curve& train, const Curve& held_out,
                           const std::string& held_out_name) {
  return plot_svg(
      loss_plot(run_name, {curve_line(train, false, name_and_loss("train", train), 0),
                           curve_line(held_out, true, name_and_loss(held_out_name, held_out), 1)}));
}

}  // namespace birkhoff
