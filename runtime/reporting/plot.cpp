#include "runtime/reporting/plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <limits>
#include <map>

#include "runtime/reporting/display_text.h"

namespace birkhoff {
namespace {

// Pixels: the picture without its legend, and the margins around the axes.
constexpr double kWidth = 760, kHeight = 440, kLeft = 70, kRight = 40, kTop = 56, kBottom = 52;
constexpr double kRow = 20;           // of the legend
constexpr double kSample = 30;        // of a line in the legend
constexpr double kCharacter = 6.9;    // mean width in this font, at most
constexpr int kLongestName = 90;      // characters of a name in the legend
constexpr std::size_t kMaxTicks = 9;  // of a logarithmic axis

// Okabe and Ito 2008, with gray instead of black: visible on white and on black pages.
constexpr std::array kColours{"#0072b2", "#d55e00", "#009e73", "#cc79a7",
                              "#e69f00", "#56b4e9", "#808080"};

constexpr const char* kStyle = R"(<style>
  text { fill: #24292f; font: 13px sans-serif; }
  .title { font-weight: bold; }
  .page { fill: #ffffff; }
  .grid { stroke: #d0d7de; }
  .axis { stroke: #57606a; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .page { fill: #0d1117; }
    .grid { stroke: #30363d; }
    .axis { stroke: #8b949e; }
  }
</style>
)";

// Maps values to pixels and places the ticks. The axis ends at round values around all that it
// includes.
class Axis {
 public:
  Axis(const PlotAxis& axis, double pixel_low, double pixel_high)
      : scale_(axis.scale), pixel_low_(pixel_low), pixel_high_(pixel_high) {}

  void include(double value) {
    low_ = std::min(low_, value);
    high_ = std::max(high_, value);
  }

  // Call after the last include(). about: how many ticks a linear axis should have.
  void choose_ticks(int about) {
    const bool linear = scale_ == AxisScale::kLinear;
    if (low_ > high_) low_ = linear ? 0 : 1, high_ = low_ + 1;  // nothing was included
    if (linear) {
      choose_linear(about);
    } else {
      choose_logarithmic();
    }
    low_ = ticks_.front();
    high_ = ticks_.back();
    const std::size_t stride = linear ? 1 : (ticks_.size() + kMaxTicks - 1) / kMaxTicks;
    for (std::size_t i = 0; i * stride < ticks_.size(); ++i) ticks_[i] = ticks_[i * stride];
    ticks_.resize((ticks_.size() + stride - 1) / stride);
  }

  double pixel(double value) const {
    const double low = position(low_), high = position(high_);
    return pixel_low_ + (position(value) - low) / (high - low) * (pixel_high_ - pixel_low_);
  }
  const std::vector<double>& ticks() const { return ticks_; }

 private:
  double position(double value) const {
    return scale_ == AxisScale::kLinear ? value : std::log2(value);
  }

  // Multiples of 1, 2 or 5 times a power of ten.
  void choose_linear(int about) {
    if (!(high_ > low_)) high_ = low_ + std::max(1.0, std::abs(low_) / 2);
    const double raw = (high_ - low_) / about;
    double distance = std::pow(10, std::floor(std::log10(raw)));
    for (const double factor : {2.0, 2.5, 2.0}) {  // to 2, 5, 10 times the power
      if (distance < raw) distance *= factor;
    }
    const auto last = std::llround(std::ceil(high_ / distance));
    for (auto i = std::llround(std::floor(low_ / distance)); i <= last; ++i) {
      ticks_.push_back(static_cast<double>(i) * distance);
    }
  }

  // Powers of two; or 1, 2 and 5 times powers of ten, but only powers of ten where these are many.
  void choose_logarithmic() {
    const bool decades = scale_ == AxisScale::kLog10;
    const double base = decades ? 10 : 2;
    const std::vector<double> factors =
        decades && high_ / low_ < 1000 ? std::vector<double>{1, 2, 5} : std::vector<double>{1};
    constexpr double kRounding = 1e-9;
    double power = std::pow(base, std::floor(std::log(low_) / std::log(base)));
    for (;; power *= base) {
      for (const double factor : factors) {
        const double value = power * factor;
        // The last one that is not above the lowest value is the first.
        if (value <= low_ * (1 + kRounding)) ticks_.clear();
        ticks_.push_back(value);
        if (value >= high_ * (1 - kRounding) && ticks_.size() > 1) return;
      }
    }
  }

  const AxisScale scale_;
  const double pixel_low_, pixel_high_;
  double low_ = std::numeric_limits<double>::infinity();
  double high_ = -std::numeric_limits<double>::infinity();
  std::vector<double> ticks_;
};

std::string escaped(const std::string& text) {
  static const std::map<char, std::string> kEntities = {
      {'&', "&amp;"}, {'<', "&lt;"}, {'>', "&gt;"}, {'"', "&quot;"}};
  std::string result;
  for (const char c : display_text(text)) {
    const auto entity = kEntities.find(c);
    result += entity == kEntities.end() ? std::string(1, c) : entity->second;
  }
  return result;
}

void append_text(std::string& svg, double x, double y, const char* attributes,
                 const std::string& text) {
  fmt::format_to(std::back_inserter(svg), "<text x=\"{:.1f}\" y=\"{:.1f}\" {}>{}</text>\n", x, y,
                 attributes, escaped(text));
}

void append_line(std::string& svg, double x1, double y1, double x2, double y2, const char* style) {
  fmt::format_to(std::back_inserter(svg),
                 "<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" {}/>\n", x1, y1, x2,
                 y2, style);
}

void append_axes(std::string& svg, const Plot& plot, const Axis& x, const Axis& y) {
  const double right = kWidth - kRight, bottom = kHeight - kBottom;
  append_text(svg, 10, 22, "class=\"title\"", plot.title);
  append_text(svg, 10, kTop - 14, "", plot.y.name);
  append_text(svg, (kLeft + right) / 2, bottom + 42, "text-anchor=\"middle\"", plot.x.name);
  for (const double value : y.ticks()) {
    append_line(svg, kLeft, y.pixel(value), right, y.pixel(value), "class=\"grid\"");
    append_text(svg, kLeft - 8, y.pixel(value) + 4, "text-anchor=\"end\"",
                fmt::format("{:.6g}", value));
  }
  for (const double value : x.ticks()) {
    append_line(svg, x.pixel(value), kTop, x.pixel(value), bottom + 5, "class=\"grid\"");
    append_text(svg, x.pixel(value), bottom + 20, "text-anchor=\"middle\"",
                fmt::format("{:.10g}", value));
  }
  append_line(svg, kLeft, bottom, right, bottom, "class=\"axis\"");
  append_line(svg, kLeft, kTop, kLeft, bottom, "class=\"axis\"");
}

std::string style_of(const PlotLine& line) {
  return fmt::format("fill=\"none\" stroke=\"{}\" stroke-width=\"{}\" stroke-opacity=\"{}\"{}",
                     kColours[static_cast<std::size_t>(line.colour) % kColours.size()],
                     line.faint ? 1 : 2, line.faint ? 0.5 : 1,
                     line.dashed ? " stroke-dasharray=\"6 4\"" : "");
}

void append_curve(std::string& svg, const PlotLine& line, const Axis& x, const Axis& y) {
  if (line.points.empty()) return;
  svg += "<polyline points=\"";
  for (const auto& [point_x, point_y] : line.points) {
    fmt::format_to(std::back_inserter(svg), "{:.1f},{:.1f} ", x.pixel(point_x), y.pixel(point_y));
  }
  svg.back() = '"';
  fmt::format_to(std::back_inserter(svg), " {}/>\n", style_of(line));
  if (!line.marked) return;
  for (const auto& [point_x, point_y] : line.points) {
    fmt::format_to(std::back_inserter(svg),
                   "<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3\" fill=\"{}\"/>\n", x.pixel(point_x),
                   y.pixel(point_y),
                   kColours[static_cast<std::size_t>(line.colour) % kColours.size()]);
  }
}

// Entries of equal width below the axes, as many in a row as fit. Returns the legend's height.
double append_legend(std::string& svg, const std::vector<PlotLine>& lines) {
  double entry_width = 1;
  std::vector<std::pair<const PlotLine*, std::string>> entries;
  for (const PlotLine& line : lines) {
    if (line.name.empty()) continue;
    entries.emplace_back(&line, last_columns(line.name, kLongestName));
    entry_width =
        std::max(entry_width, kSample + 20 + kCharacter * display_columns(entries.back().second));
  }
  const auto in_row = static_cast<std::size_t>(std::max(1.0, (kWidth - kLeft) / entry_width));
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const double x = kLeft + entry_width * static_cast<double>(i % in_row);
    const double y = kHeight + kRow * (static_cast<double>(i / in_row) + 0.5);
    append_line(svg, x, y, x + kSample, y, style_of(*entries[i].first).c_str());
    append_text(svg, x + kSample + 8, y + 4, "", entries[i].second);
  }
  return kRow * static_cast<double>((entries.size() + in_row - 1) / in_row) + kRow / 2;
}

}  // namespace

std::string plot_svg(const Plot& plot, SvgPlace place) {
  Axis x(plot.x, kLeft, kWidth - kRight), y(plot.y, kHeight - kBottom, kTop);
  for (const PlotLine& line : plot.lines) {
    for (const auto& [point_x, point_y] : line.points) {
      x.include(point_x);
      y.include(point_y);
    }
  }
  x.choose_ticks(8);
  y.choose_ticks(6);
  std::string body;
  append_axes(body, plot, x, y);
  for (const PlotLine& line : plot.lines) append_curve(body, line, x, y);
  const double height = kHeight + append_legend(body, plot.lines);
  return fmt::format(
      "<svg {5}viewBox=\"0 0 {0} {1}\" width=\"{0}\" height=\"{1}\">\n<title>{2}</title>\n{3}"
      "<rect class=\"page\" width=\"{0}\" height=\"{1}\"/>\n{4}</svg>\n",
      kWidth, height, escaped(plot.title), kStyle, body,
      place == SvgPlace::kFile ? "xmlns=\"http://www.w3.org/2000/svg\" " : "");
}

}  // namespace birkhoff
