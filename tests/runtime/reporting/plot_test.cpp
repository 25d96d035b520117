#include "runtime/reporting/plot.h"

#include <gmock/gmock.h>

#include <cstdio>
#include <regex>
#include <sstream>

#include "runtime/reporting/display_text.h"

namespace birkhoff {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

// Points of the n-th polyline, in pixels.
std::vector<std::pair<double, double>> polyline(const std::string& svg, int n) {
  std::size_t at = 0;
  for (int i = 0; i <= n; ++i) at = svg.find("<polyline points=\"", at) + 18;
  std::istringstream text(svg.substr(at, svg.find('"', at) - at));
  std::vector<std::pair<double, double>> points;
  char comma = 0;
  for (double x = 0, y = 0; text >> x >> comma >> y;) points.emplace_back(x, y);
  return points;
}

// Texts that begin at, end at, or are centered on a pixel: labels of ticks.
std::vector<std::string> labels(const std::string& svg, const std::string& anchor) {
  std::vector<std::string> found;
  const std::regex text("text-anchor=\"" + anchor + "\">([^<]*)<");
  for (auto match = std::sregex_iterator(svg.begin(), svg.end(), text);
       match != std::sregex_iterator(); ++match) {
    found.push_back((*match)[1]);
  }
  return found;
}

Plot one_line(std::vector<std::pair<double, double>> points, AxisScale x, AxisScale y) {
  Plot plot{"title", {"x", x}, {"y", y}, {}};
  plot.lines.push_back({.name = "line", .points = std::move(points)});
  return plot;
}

TEST(Plot, LinesLieOnLogarithmicAxes) {
  const std::string svg =
      plot_svg(one_line({{4, 1}, {16, 100}, {8, 10}}, AxisScale::kLog2, AxisScale::kLog10));
  // The third point is the middle of the first two on both axes.
  const auto points = polyline(svg, 0);
  ASSERT_EQ(points.size(), 3u);
  EXPECT_NEAR(points[2].first, (points[0].first + points[1].first) / 2, 0.11);
  EXPECT_NEAR(points[2].second, (points[0].second + points[1].second) / 2, 0.11);
  EXPECT_LT(points[0].first, points[1].first);
  EXPECT_GT(points[0].second, points[1].second) << "more is higher up";
  EXPECT_THAT(labels(svg, "end"), ElementsAre("1", "2", "5", "10", "20", "50", "100"));
  EXPECT_THAT(labels(svg, "middle"), ElementsAre("x", "4", "8", "16"));
}

TEST(Plot, ManyPowersHaveFewLabels) {
  const std::string svg =
      plot_svg(one_line({{1, 1e-9}, {1 << 20, 1e12}}, AxisScale::kLog2, AxisScale::kLog10));
  EXPECT_LE(labels(svg, "end").size(), 9u);
  EXPECT_LE(labels(svg, "middle").size(), 10u);  // and the axis' name
}

TEST(Plot, TicksAreRoundAndHoldAllPoints) {
  const std::string svg =
      plot_svg(one_line({{10, 2.31}, {1000, 5.49}}, AxisScale::kLinear, AxisScale::kLinear));
  EXPECT_THAT(labels(svg, "end"), ElementsAre("2", "3", "4", "5", "6"));
  EXPECT_THAT(labels(svg, "middle"), ElementsAre("x", "0", "200", "400", "600", "800", "1000"));
}

TEST(Plot, AxesWithoutExtentAreDrawn) {
  for (const AxisScale scale : {AxisScale::kLinear, AxisScale::kLog2, AxisScale::kLog10}) {
    for (const double value : {1e-300, 1.0, 1e300}) {
      const std::string svg = plot_svg(one_line({{value, value}}, scale, scale));
      EXPECT_THAT(svg, Not(HasSubstr("nan")));
      EXPECT_THAT(svg, Not(HasSubstr("inf")));
      EXPECT_EQ(polyline(svg, 0).size(), 1u);
    }
    EXPECT_THAT(plot_svg({"nothing", {"x", scale}, {"y", scale}, {}}), HasSubstr("</svg>"));
  }
}

TEST(Plot, NamesAreEscapedAndShownWhole) {
  Plot plot = one_line({{1, 1}, {2, 2}}, AxisScale::kLinear, AxisScale::kLinear);
  plot.title = "a < b & c";
  plot.lines[0].name = "</svg><script>\x1b[31m\xff\xc3\xa9";
  const std::string svg = plot_svg(plot);
  EXPECT_THAT(svg, HasSubstr("<title>a &lt; b &amp; c</title>"));
  EXPECT_THAT(svg, HasSubstr(">&lt;/svg&gt;&lt;script&gt;?[31m?\xc3\xa9</text>"));
  plot.lines[0].name = std::string(500, 'a') + "/end";
  EXPECT_THAT(plot_svg(plot), HasSubstr(">..." + std::string(83, 'a') + "/end</text>"));
}

// The legend is below the axes, which take the whole width; it never widens the picture.
TEST(Plot, TheLegendHasAsManyColumnsAsFit) {
  Plot plot{"title", {"x"}, {"y"}, {}};
  for (int i = 0; i < 9; ++i) {
    plot.lines.push_back({.name = "name " + std::to_string(i),
                          .points = {{0, i}, {1, i}},
                          .colour = i,
                          .marked = i == 0,
                          .dashed = i >= 7});
  }
  plot.lines.push_back({.name = "", .points = {{0, 0}, {1, 1}}});
  const std::string svg = plot_svg(plot);
  EXPECT_THAT(svg, HasSubstr("viewBox=\"0 0 760 490\"")) << "two rows";
  EXPECT_DOUBLE_EQ(polyline(svg, 0).back().first, 720) << "40 pixels from the right end";
  EXPECT_THAT(svg, HasSubstr("stroke-dasharray"));
  const std::regex circle("<circle ");
  EXPECT_EQ(std::distance(std::sregex_iterator(svg.begin(), svg.end(), circle), {}), 2);
}

TEST(DisplayText, WhatTerminalsCannotShowIsAQuestionMark) {
  EXPECT_EQ(display_text("run/first"), "run/first");
  EXPECT_EQ(display_text("a\nb\x1b[0m\x7f"), "a?b?[0m?");
  EXPECT_EQ(display_text("\xff\xc3\xa9\xc3"), "?\xc3\xa9?");
  EXPECT_EQ(display_text("\xc2\x9b"
                         "31m"),
            "?31m")
      << "a control character of C1";
  EXPECT_EQ(display_text("\xe2\x80\xae"), "?") << "turns text round";
  EXPECT_EQ(display_text("\xef\xbf\xbf"), "?") << "no character of XML";
  EXPECT_EQ(display_text(std::string("\0", 1)), "?");
}

TEST(DisplayText, ColumnsAreThoseOfTheTerminal) {
  EXPECT_EQ(display_columns("abc"), 3);
  EXPECT_EQ(display_columns("\xc3\xa9"), 1);                  // e with an accent
  EXPECT_EQ(display_columns("e\xcc\x81"), 1);                 // the same in two characters
  EXPECT_EQ(display_columns("\xe6\x97\xa5\xe6\x9c\xac"), 4);  // two wide characters
  EXPECT_EQ(display_columns("\xff"), 1);
  EXPECT_EQ(last_columns("run/first", 9), "run/first");
  EXPECT_EQ(last_columns("run/first", 8), "...first");
  EXPECT_EQ(last_columns("\xe6\x97\xa5\xe6\x9c\xac", 4), "\xe6\x97\xa5\xe6\x9c\xac");
  EXPECT_EQ(last_columns("a\xe6\x97\xa5\xe6\x9c\xac", 4), "...") << "no half of a character";
}

}  // namespace
}  // namespace birkhoff
