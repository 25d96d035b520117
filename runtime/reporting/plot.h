// Line plots as self-contained SVG text, for light and dark pages. Local.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace birkhoff {

enum class AxisScale { kLinear, kLog2, kLog10 };

struct PlotAxis {
  std::string name;
  AxisScale scale = AxisScale::kLinear;
};

struct PlotLine {
  std::string name;                               // in the legend; empty: no entry
  std::vector<std::pair<double, double>> points;  // x, y: finite, above 0 on a logarithmic axis
  int colour = 0;                                 // index of the line's color
  bool faint = false;                             // thin, so that other lines stand out
  bool marked = false;                            // a dot at each point
  bool dashed = false;
};

struct Plot {
  std::string title;
  PlotAxis x, y;
  std::vector<PlotLine> lines;
};

// Where the text goes. In an HTML page it needs no namespace, which is a URL.
enum class SvgPlace { kFile, kPage };

// Axes that hold all points, with ticks at round values, the lines in order, and a legend below.
// The first 7 colors differ with and without color vision; later ones repeat them. Names may hold
// any bytes.
std::string plot_svg(const Plot& plot, SvgPlace place = SvgPlace::kFile);

}  // namespace birkhoff
