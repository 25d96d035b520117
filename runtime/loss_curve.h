// The loss curve of a run: points thinned to a bounded number, and their picture.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace birkhoff {

// Points of one curve. Memory is bounded: a full curve drops every other point and from then on
// keeps half as many.
class Curve {
 public:
  struct Point {
    double step = 0, loss = 0;
  };
  static constexpr std::size_t kMaxPoints = 2048;

  // Steps must not go down. Losses that are not finite are left out.
  void add(std::int64_t step, double loss);
  // In order; the newest point is always among them.
  std::vector<Point> points() const;

 private:
  std::vector<Point> kept_;
  Point newest_;
  std::int64_t num_added_ = 0;
  std::int64_t stride_ = 1;  // every stride_-th point is kept
};

// A self-contained SVG with the run's name, axes, ticks and a legend, in colours for light and dark
// viewers.
std::string loss_curve_svg(const std::string& run_name, const Curve& train, const Curve& held_out,
                           const std::string& held_out_name);

}  // namespace birkhoff
