// The loss curve of a run: points thinned to a bounded number, and their picture.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/reporting/plot.h"

namespace birkhoff {

// Points of one curve. Memory is bounded: a full curve drops every other point and keeps half as
// many from then on.
class Curve {
 public:
  struct Point {
    double step = 0, loss = 0;
  };
  static constexpr std::size_t kMaxPoints = 2048;

  // Steps must not decrease. Non-finite losses are left out.
  void add(std::int64_t step, double loss);
  // In order; the newest point is always among them.
  std::vector<Point> points() const;

 private:
  std::vector<Point> kept_;
  Point newest_;
  std::int64_t num_added_ = 0;
  std::int64_t stride_ = 1;  // every stride_-th point is kept
};

// The plot line of a curve: faint, or marked if its losses are of held-out data.
PlotLine curve_line(const Curve& curve, bool held_out, std::string name, int colour);
// A plot of losses in nats by step; the loss axis is logarithmic if the losses span a
// factor of ten.
Plot loss_plot(std::string title, std::vector<PlotLine> lines);

// The picture of one run.
std::string loss_curve_svg(const std::string& run_name, const Curve& train, const Curve& held_out,
                           const std::string& held_out_name);

}  // namespace birkhoff
