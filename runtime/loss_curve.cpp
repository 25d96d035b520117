#include "runtime/loss_curve.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>

#include "configs/words.h"

namespace birkhoff {
namespace {

constexpr double kWidth = 760, kHeight = 440;                       // of the picture, in pixels
constexpr double kLeft = 64, kRight = 24, kTop = 44, kBottom = 52;  // margins around the axes
constexpr double kLegend = kTop - 12;                               // its base line

constexpr const char* kStyle = R"(<style>
  .page { fill: #ffffff; } .text { fill: #24292f; font: 13px sans-serif; }
  .grid { stroke: #d0d7de; stroke-width: 1; } .axis { stroke: #57606a; stroke-width: 1; }
  .train { fill: none; stroke: #1f77b4; stroke-width: 1.2; }
  .held-out { fill: none; stroke: #d9480f; stroke-width: 2; } .dot { fill: #d9480f; }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117; } .text { fill: #e6edf3; } .grid { stroke: #30363d; }
    .axis { stroke: #8b949e; } .train { stroke: #58a6ff; } .held-out { stroke: #ff922b; }
    .dot { fill: #ff922b; }
  }
</style>
)";

// An axis: data range, pixel range, and a round distance between ticks.
struct Axis {
  double low = 0, high = 1, pixel_low = 0, pixel_high = 1, tick = 1;

  double pixel(double value) const {
    return pixel_low + (value - low) / (high - low) * (pixel_high - pixel_low);
  }
};

// 1, 2 or 5 times a power of ten, so that about `count` ticks fit.
double round_tick(double range, int count) {
  const double raw = range / count;
  const double power = std::pow(10.0, std::floor(std::log10(raw)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= raw) return factor * power;
  }
  return 10.0 * power;
}

Axis make_axis(double low, double high, double pixel_low, double pixel_high, int ticks) {
  if (!(high > low)) high = low + 1;
  Axis axis{low, high, pixel_low, pixel_high, round_tick(high - low, ticks)};
  axis.low = std::floor(low / axis.tick) * axis.tick;
  axis.high = std::ceil(high / axis.tick) * axis.tick;
  return axis;
}

std::vector<double> ticks(const Axis& axis) {
  std::vector<double> values;
  const auto first = std::llround(axis.low / axis.tick), last = std::llround(axis.high / axis.tick);
  for (auto i = first; i <= last; ++i) values.push_back(static_cast<double>(i) * axis.tick);
  return values;
}

void append_text(std::string& out, double x, double y, const char* anchor,
                 const std::string& text) {
  fmt::format_to(std::back_inserter(out),
                 "<text class=\"text\" x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\">{}</text>\n", x,
                 y, anchor, text);
}

void append_line(std::string& out, const char* style, double x1, double y1, double x2, double y2) {
  fmt::format_to(std::back_inserter(out),
                 "<line class=\"{}\" x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\"/>\n",
                 style, x1, y1, x2, y2);
}

void append_axes(std::string& out, const Axis& x, const Axis& y) {
  for (const double value : ticks(y)) {
    append_line(out, "grid", x.pixel_low, y.pixel(value), x.pixel_high, y.pixel(value));
    append_text(out, x.pixel_low - 8, y.pixel(value) + 4, "end", fmt::format("{:.6g}", value));
  }
  for (const double value : ticks(x)) {
    append_line(out, "axis", x.pixel(value), y.pixel_low, x.pixel(value), y.pixel_low + 5);
    append_text(out, x.pixel(value), y.pixel_low + 20, "middle", fmt::format("{:.10g}", value));
  }
  append_line(out, "axis", x.pixel_low, y.pixel_low, x.pixel_high, y.pixel_low);
  append_line(out, "axis", x.pixel_low, y.pixel_low, x.pixel_low, y.pixel_high);
  append_text(out, (x.pixel_low + x.pixel_high) / 2, kHeight - 10, "middle", "step");
  append_text(out, 10, kLegend, "start", "loss (nats per token)");
}

void append_curve(std::string& out, const char* style, const std::vector<Curve::Point>& points,
                  const Axis& x, const Axis& y) {
  if (points.empty()) return;
  fmt::format_to(std::back_inserter(out), "<polyline class=\"{}\" points=\"", style);
  for (const auto& point : points) {
    fmt::format_to(std::back_inserter(out), "{:.1f},{:.1f} ", x.pixel(point.step),
                   y.pixel(point.loss));
  }
  out.back() = '"';
  out += "/>\n";
}

void append_legend(std::string& out, const char* style, double x, const std::string& name) {
  append_line(out, style, x, kLegend - 4, x + 24, kLegend - 4);
  append_text(out, x + 30, kLegend, "start", name);
}

// As text of XML, and not wider than the picture. Names of folders may hold anything.
std::string escaped(const std::string& name) {
  constexpr std::size_t kMostBytes = 90;
  std::string text = printable(name).substr(0, kMostBytes);
  text = text.substr(0, find_invalid_utf8(text));
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        out += c;
    }
  }
  return out;
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

std::string loss_curve_svg(const std::string& run_name, const Curve& train, const Curve& held_out,
                           const std::string& held_out_name) {
  const auto train_points = train.points(), held_out_points = held_out.points();
  double last_step = 1, low = INFINITY, high = -INFINITY;
  for (const auto* points : {&train_points, &held_out_points}) {
    for (const auto& point : *points) {
      last_step = std::max(last_step, point.step);
      low = std::min(low, point.loss);
      high = std::max(high, point.loss);
    }
  }
  if (low > high) low = 0, high = 1;  // no points yet
  const Axis x = make_axis(0, last_step, kLeft, kWidth - kRight, 8);
  const Axis y = make_axis(low, high, kHeight - kBottom, kTop, 6);

  std::string out = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" "
      "height=\"{1}\">\n<title>Loss curve of {3}</title>\n{2}"
      "<rect class=\"page\" width=\"{0}\" height=\"{1}\"/>\n",
      kWidth, kHeight, kStyle, escaped(run_name));
  append_text(out, kWidth / 2, kTop - 28, "middle", escaped(run_name));
  append_axes(out, x, y);
  append_curve(out, "train", train_points, x, y);
  append_curve(out, "held-out", held_out_points, x, y);
  for (const auto& point : held_out_points) {
    fmt::format_to(std::back_inserter(out),
                   "<circle class=\"dot\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3\"/>\n",
                   x.pixel(point.step), y.pixel(point.loss));
  }
  append_legend(out, "train", kWidth - 260, "train");
  append_legend(out, "held-out", kWidth - 150,
                held_out_points.empty()
                    ? held_out_name
                    : fmt::format("{} {:.4f}", held_out_name, held_out_points.back().loss));
  return out + "</svg>\n";
}

}  // namespace birkhoff
