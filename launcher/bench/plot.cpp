#include "launcher/bench/plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

namespace birkhoff {
namespace {

// Pixels.
constexpr double kWidth = 900, kHeight = 480, kLeft = 70, kRight = 360, kTop = 40, kBottom = 50,
                 kRow = 18;

// Told apart with and without colour vision (Okabe and Ito 2008).
constexpr std::array kColours{"#0072b2", "#d55e00", "#009e73", "#cc79a7",
                              "#e69f00", "#56b4e9", "#000000"};

std::string escaped(const std::string& text) {
  std::string result;
  for (const char c : text) {
    if (c == '&') {
      result += "&amp;";
    } else if (c == '<') {
      result += "&lt;";
    } else {
      result += c;
    }
  }
  return result;
}

std::string text_at(double x, double y, const char* anchor, const std::string& text) {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\">{}</text>\n", x, y, anchor,
                     escaped(text));
}

std::string line_at(double x1, double y1, double x2, double y2, const char* style) {
  return fmt::format("<path d=\"M{:.1f} {:.1f}L{:.1f} {:.1f}\" {}/>\n", x1, y1, x2, y2, style);
}

// Values to pixels: from powers of `base` around all values to [from, to].
class Axis {
 public:
  Axis(double base, double from, double to) : base_(base), from_(from), to_(to) {}
  void include(double value) {
    const double power = std::log(value) / std::log(base_);
    first_ = std::min(first_, static_cast<int>(std::floor(power + 1e-9)));
    last_ = std::max(last_, static_cast<int>(std::ceil(power - 1e-9)));
  }
  int first() const { return first_; }
  int last() const { return std::max(last_, first_ + 1); }
  double value(int power) const { return std::pow(base_, power); }
  double at(double x) const {
    return from_ + (std::log(x) / std::log(base_) - first()) / (last() - first()) * (to_ - from_);
  }

 private:
  double base_, from_, to_;
  int first_ = std::numeric_limits<int>::max(), last_ = std::numeric_limits<int>::min();
};

}  // namespace

std::string log_log_svg(const std::string& title, const std::string& x_name,
                        const std::string& y_name, const std::vector<PlotLine>& lines) {
  const double right = kWidth - kRight, bottom = kHeight - kBottom;
  Axis x_axis(2, kLeft, right), y_axis(10, bottom, kTop);
  for (const PlotLine& line : lines) {
    for (const auto& [x, y] : line.points) {
      x_axis.include(x);
      y_axis.include(y);
    }
  }
  const double height = std::max(kHeight, kTop + kRow * static_cast<double>(lines.size() + 1));
  std::string svg = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{:.0f}\" height=\"{:.0f}\" "
      "font-family=\"sans-serif\" font-size=\"12\">\n"
      "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
      kWidth, height);
  svg += text_at(kLeft, kTop - 18, "start", title);
  svg += text_at((kLeft + right) / 2, bottom + 38, "middle", x_name);
  svg += text_at(kLeft - 60, kTop - 4, "start", y_name);
  const char* const grid = "stroke=\"#dddddd\"";
  for (int power = x_axis.first(); power <= x_axis.last(); ++power) {
    const double x = x_axis.at(x_axis.value(power));
    svg += line_at(x, kTop, x, bottom, grid);
    svg += text_at(x, bottom + 18, "middle", fmt::format("{:g}", x_axis.value(power)));
  }
  for (int power = y_axis.first(); power <= y_axis.last(); ++power) {
    const double y = y_axis.at(y_axis.value(power));
    svg += line_at(kLeft, y, right, y, grid);
    svg += text_at(kLeft - 6, y + 4, "end", fmt::format("{:g}", y_axis.value(power)));
  }
  for (std::size_t i = 0; i < lines.size(); ++i) {
    const std::string style = fmt::format("stroke=\"{}\" stroke-width=\"2\" fill=\"none\"{}",
                                          kColours[i % kColours.size()],
                                          lines[i].dashed ? " stroke-dasharray=\"5\"" : "");
    std::string path;
    for (const auto& [x, y] : lines[i].points) {
      const double px = x_axis.at(x), py = y_axis.at(y);
      path += fmt::format("{}{:.1f} {:.1f}", path.empty() ? "M" : "L", px, py);
      svg += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3\" {}/>\n", px, py, style);
    }
    svg += fmt::format("<path d=\"{}\" {}/>\n", path, style);
    const double y = kTop + kRow * static_cast<double>(i);
    svg += line_at(right + 12, y, right + 36, y, style.c_str());
    svg += text_at(right + 42, y + 4, "start", lines[i].name);
  }
  return svg + "</svg>\n";
}

}  // namespace birkhoff
