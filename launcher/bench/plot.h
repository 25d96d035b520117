// A plot as SVG text, for reports. Local.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace birkhoff {

struct PlotLine {
  std::string name;
  std::vector<std::pair<double, double>> points;  // x, y, both above 0
  bool dashed = false;
};

// Lines on logarithmic axes, with grid lines at powers of two (x) and ten (y) and names beside the
// lines' colours. At least one line has a point.
std::string log_log_svg(const std::string& title, const std::string& x_name,
                        const std::string& y_name, const std::vector<PlotLine>& lines);

}  // namespace birkhoff
