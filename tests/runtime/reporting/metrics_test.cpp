#include "runtime/reporting/metrics.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <thread>

#include "cluster/base/logging/log.h"
#include "cluster/base/text/utf8.h"
#include "configs/loader/message_text.h"
#include "runtime/reporting/metrics_reader.h"
#include "runtime/reporting/reporter.h"
#include "tests/cluster/base/temporary_folder.h"
#include "tests/runtime/reporting/reports.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;

std::string hex(const std::string& bytes) {
  std::string out;
  for (const unsigned char byte : bytes) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", byte);
    out += digits;
  }
  return out;
}

// Tags of an XML text close in order and attributes are quoted, as a browser needs to draw it.
void expect_well_formed(const std::string& text) {
  std::vector<std::string> open;
  for (std::size_t at = text.find('<'); at != std::string::npos; at = text.find('<', at)) {
    const std::size_t end = text.find('>', at);
    ASSERT_NE(end, std::string::npos);
    const std::string tag = text.substr(at + 1, end - at - 1);
    EXPECT_EQ(std::count(tag.begin(), tag.end(), '"') % 2, 0) << tag;
    const std::string name =
        tag.substr(tag[0] == '/', tag.find_first_of(" />", 1) - (tag[0] == '/'));
    if (tag[0] == '/') {
      ASSERT_FALSE(open.empty()) << tag;
      EXPECT_EQ(open.back(), name);
      open.pop_back();
    } else if (tag.back() != '/') {
      open.push_back(name);
    }
    at = end;
  }
  EXPECT_TRUE(open.empty());
}

MetricsOptions options_in(const fs::path& folder) {
  MetricsOptions options;
  options.lines_path = folder / "metrics.jsonl";
  options.svg_path = folder / "loss.svg";
  options.event_folder = folder;
  options.num_steps = 25;
  options.every = 10;
  return options;
}

TEST(Metrics, LinesHaveExactlyTheDocumentedKeys) {
  StepReport report = report_at(10, 2.5);
  report.tokens_per_second = 2000;
  EXPECT_EQ(
      step_line(report, 12.3456),
      "{\"step\":10,\"loss\":2.5,\"tokens\":1000,\"tokens_per_second\":2000,\"step_ms\":50,"
      "\"loader_wait_ms\":0.5,\"learning_rate\":0.001,\"grad_norm\":0.5,\"elapsed_seconds\":12.346}"
      "\n");
  EXPECT_EQ(evaluation_line(7, "valid",
                            {.loss = 1.25,
                             .tokens = 400,
                             .task = {{{"bits_per_byte", 1.8, ""}}, {{"bytes", 1600, ""}}}},
                            60),
            "{\"step\":7,\"split\":\"valid\",\"loss\":1.25,\"bits_per_byte\":1.8,\"tokens\":400,"
            "\"bytes\":1600,\"elapsed_seconds\":60}\n");
  // Plain numbers: no exponents, and float digits where the configuration has floats.
  report.learning_rate = static_cast<double>(4e-4f);
  report.grad_norm = 2e-6;
  EXPECT_NE(step_line(report, 0).find("\"learning_rate\":0.0004,\"grad_norm\":0.000002,"),
            std::string::npos)
      << step_line(report, 0);
  // Numbers read back to the same bits, and non-finite ones are null: JSON has no NaN.
  report.loss = 0.1 + 0.2;
  EXPECT_EQ(nlohmann::json::parse(step_line(report, 0)).at("loss").get<double>(), 0.1 + 0.2);
  report.loss = std::numeric_limits<double>::quiet_NaN();
  EXPECT_TRUE(nlohmann::json::parse(step_line(report, 0)).at("loss").is_null());
  // What does not exist has no key: the loss of a batch without targets, and withheld figures.
  report.loss.reset();
  EXPECT_FALSE(nlohmann::json::parse(step_line(report, 0)).contains("loss"));
  EXPECT_EQ(progress_line(report, 20).find("step 10/20  no targets  left"), 0u);
  const Evaluation withheld{.loss = 1.25, .tokens = 400};
  EXPECT_EQ(
      evaluation_line(7, "valid", withheld, 60),
      "{\"step\":7,\"split\":\"valid\",\"loss\":1.25,\"tokens\":400,\"elapsed_seconds\":60}\n");
}

TEST(Metrics, AModelsFiguresAreInLinesAndEvents) {
  const TemporaryFolder folder;
  MetricsOptions options = options_in(folder.path());
  options.every = 1;
  Metrics metrics(options);
  testing::internal::CaptureStderr();
  StepReport report = report_at(1, 3.0);
  report.figures = {{"blocks.0.dropped", 0.125}, {"blocks.1.dropped", std::nan("")}};
  metrics.step(report, 100);
  metrics.evaluation(1, "valid", evaluation_of(2.75, {{"blocks.0.dropped", 0.5}}));
  metrics.close();
  testing::internal::GetCapturedStderr();
  std::istringstream lines(contents(folder.path("metrics.jsonl")));
  std::string line;
  std::getline(lines, line);
  EXPECT_TRUE(line.ends_with(",\"blocks.0.dropped\":0.125,\"blocks.1.dropped\":null}")) << line;
  std::getline(lines, line);
  EXPECT_TRUE(line.ends_with(",\"blocks.0.dropped\":0.5}")) << line;
  // A resumed run reads its lines.
  EXPECT_EQ(read_metrics(folder.path("metrics.jsonl")).steps.size(), 1u);
  for (const auto& entry : fs::directory_iterator(folder.path())) {
    if (!entry.path().filename().string().starts_with("events.out.tfevents.")) continue;
    const std::string events = contents(entry.path());
    EXPECT_NE(events.find("train/blocks.0.dropped"), std::string::npos);
    EXPECT_NE(events.find("valid/blocks.0.dropped"), std::string::npos);
  }
}

TEST(Metrics, WritesEveryNthAndTheLastStepAndMeansOfTheInterval) {
  const TemporaryFolder folder;
  Metrics metrics(options_in(folder.path()));
  testing::internal::CaptureStderr();
  for (std::int64_t step = 1; step <= 25; ++step) {
    StepReport report = report_at(step, 3.0 / static_cast<double>(step));
    report.step_ms = step <= 10 ? 40 : 80;
    report.loader_wait_ms = step % 2 == 0 ? 3 : 1;
    metrics.step(report, 100);
  }
  const std::string told = testing::internal::GetCapturedStderr();
  // Each line is written to the file at once, not at the end.
  std::istringstream lines(contents(folder.path("metrics.jsonl")));
  EXPECT_EQ(metrics.lines_bytes(), static_cast<std::int64_t>(lines.str().size()));
  std::vector<nlohmann::json> parsed;
  for (std::string line; std::getline(lines, line);) parsed.push_back(nlohmann::json::parse(line));
  ASSERT_EQ(parsed.size(), 3u);
  EXPECT_EQ(parsed[0].at("step"), 10);
  EXPECT_EQ(parsed[1].at("step"), 20);
  EXPECT_EQ(parsed[2].at("step"), 25);
  EXPECT_DOUBLE_EQ(parsed[0].at("step_ms").get<double>(), 40);
  EXPECT_DOUBLE_EQ(parsed[1].at("step_ms").get<double>(), 80);
  EXPECT_DOUBLE_EQ(parsed[1].at("loader_wait_ms").get<double>(), 2);
  EXPECT_DOUBLE_EQ(parsed[2].at("loader_wait_ms").get<double>(), 1.8);
  EXPECT_DOUBLE_EQ(parsed[1].at("tokens_per_second").get<double>(), 1250);
  // Not a terminal: one plain line each, without control characters.
  EXPECT_EQ(std::count(told.begin(), told.end(), '\n'), 3);
  for (const char c : told) EXPECT_TRUE(c == '\n' || (c >= ' ' && c < 127)) << int(c);
  metrics.close();
}

// Losses of another split do not compare: the curve shows those of the split that is evaluated.
TEST(Metrics, TheCurveIsOfOneSplit) {
  const TemporaryFolder folder;
  MetricsOptions options = options_in(folder.path());
  testing::internal::CaptureStderr();
  {
    options.split = "test";
    Metrics metrics(options);
    metrics.evaluation(5, "test", {.loss = 0.5});
    metrics.close();
  }
  options.split = "valid";
  Metrics metrics(options);
  metrics.close();
  testing::internal::GetCapturedStderr();
  EXPECT_EQ(contents(folder.path("loss.svg")).find("0.5000"), std::string::npos);
}

TEST(Metrics, ResumingKeepsTheCurveAndStartsANewEventFile) {
  const TemporaryFolder folder;
  for (int part = 0; part < 2; ++part) {
    MetricsOptions options = options_in(folder.path());
    options.first_step = part == 0 ? 1 : 11;
    Metrics metrics(options);
    testing::internal::CaptureStderr();
    const std::int64_t step = part == 0 ? 10 : 20;
    metrics.step(report_at(step, part == 0 ? 3.0 : 2.0), 100);
    metrics.evaluation(step, "valid", evaluation_of(2.75 - part));
    metrics.close();
    testing::internal::GetCapturedStderr();
  }
  const std::string svg = contents(folder.path("loss.svg"));
  expect_well_formed(svg);
  const auto first_curve = svg.substr(svg.find("<polyline points="), 60);
  EXPECT_EQ(std::count(first_curve.begin(), first_curve.end(), ','), 2) << first_curve;
  EXPECT_NE(svg.find("valid 1.7500"), std::string::npos);
  EXPECT_NE(svg.find("prefers-color-scheme: dark"), std::string::npos);
  std::vector<std::string> events;
  for (const auto& entry : fs::directory_iterator(folder.path())) {
    if (entry.path().filename().string().starts_with("events.out.tfevents."))
      events.push_back(contents(entry.path()));
  }
  ASSERT_EQ(events.size(), 2u);
  // Each file says at which step its session starts, so that TensorBoard forgets what follows.
  for (const char* start : {"\x10\x01\x3a\x02\x08\x01", "\x10\x0b\x3a\x02\x08\x01"}) {
    EXPECT_EQ(std::count_if(
                  events.begin(), events.end(),
                  [&](const std::string& bytes) { return bytes.find(start) != std::string::npos; }),
              1);
  }
}

// TensorBoard reads files in the order of the times in their names, and forgets what follows the
// start of a session. A resumed run's machine may have a clock that is behind.
TEST(Metrics, AnEventFileIsLaterThanAllOthersByItsName) {
  const TemporaryFolder folder;
  const std::string ahead = "events.out.tfevents.4102444800.node.12345.0";
  std::ofstream(folder.path(ahead)) << "of a clock that is ahead";
  for (int resumed = 0; resumed < 2; ++resumed) {
    Metrics metrics(options_in(folder.path()));
    metrics.close();
  }
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder.path())) {
    if (entry.path().filename().string().starts_with("events")) {
      names.push_back(entry.path().filename().string().substr(0, 30));
    }
  }
  std::sort(names.begin(), names.end());
  EXPECT_THAT(names, testing::ElementsAre("events.out.tfevents.4102444800",
                                          "events.out.tfevents.4102444801",
                                          "events.out.tfevents.4102444802"));
}

// The time continues from the last line, however often a run is resumed.
TEST(Metrics, ElapsedSecondsGoOnThroughRestarts) {
  const TemporaryFolder folder;
  double now = 1000;
  for (int part = 0; part < 3; ++part) {
    MetricsOptions options = options_in(folder.path());
    options.every = 1;
    options.clock = [&now] { return now; };
    now += 1e6;  // while nothing trains
    Metrics metrics(options);
    testing::internal::CaptureStderr();
    now += 10;
    metrics.step(report_at(2 * part + 1, 3.0), 100);
    now += 5;
    metrics.evaluation(2 * part + 1, "valid", evaluation_of(2.75));
    EXPECT_DOUBLE_EQ(metrics.elapsed_seconds(), 15 * (part + 1));
    EXPECT_EQ(metrics.summary(), "train loss 3.0000, valid loss 2.7500, 0:" +
                                     std::to_string(15 * (part + 1)) + ", 7 tokens/s");
    metrics.close();
    testing::internal::GetCapturedStderr();
    // A line of an earlier version, without the key.
    if (part == 0) {
      std::ofstream(folder.path("metrics.jsonl"), std::ios::app)
          << "{\"step\":2,\"loss\":3.0,\"tokens\":200}\n";
    }
  }
  std::vector<double> elapsed;
  std::istringstream lines(contents(folder.path("metrics.jsonl")));
  for (std::string line; std::getline(lines, line);) {
    const auto json = nlohmann::json::parse(line);
    if (json.contains("elapsed_seconds")) elapsed.push_back(json["elapsed_seconds"].get<double>());
  }
  EXPECT_EQ(elapsed, (std::vector<double>{10, 15, 25, 30, 40, 45}));
}

// A terminal gets a bar; the log file gets lines, in every mode and on every rank.
TEST(Metrics, LogFilesHaveALineOfEachDueStepInEveryMode) {
  for (const bool terminal : {false, true}) {
    const TemporaryFolder folder;
    for (const int rank : {0, 1}) {
      testing::internal::CaptureStderr();
      Log log(rank);
      const std::string path = folder.path("log") + std::to_string(rank);
      log.open(path);
      MetricsOptions options = options_in(folder.path());
      options.terminal = terminal;
      std::optional<Metrics> metrics;
      if (rank == 0) metrics.emplace(options);
      StepLog step_log(options.every, options.num_steps);
      for (std::int64_t step = 1; step <= 25; ++step) {
        if (metrics) {
          metrics->step(report_at(step, 2), 100);
        } else {
          step_log.step(report_at(step, 2), 100);
        }
      }
      if (metrics) metrics->close();
      const std::string shown = testing::internal::GetCapturedStderr();
      const std::string text = contents(path);
      EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 3) << text;
      for (const char* step : {"step 10/25", "step 20/25", "step 25/25  loss 2.0000"}) {
        EXPECT_NE(text.find(step), std::string::npos) << step << " in: " << text;
      }
      const bool shows_lines = rank == 0 && !terminal;
      EXPECT_EQ(std::count(shown.begin(), shown.end(), '\n'), shows_lines ? 3 : 0) << shown;
    }
  }
}

TEST(Metrics, NamesADamagedLine) {
  const TemporaryFolder folder;
  std::ofstream(folder.path("metrics.jsonl")) << step_line(report_at(1, 1), 0) << "{\"step\":2,\n";
  try {
    Metrics metrics(options_in(folder.path()));
    FAIL() << "a damaged line was read";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kStorage);
    EXPECT_NE(std::string(error.what()).find("metrics.jsonl:2:"), std::string::npos)
        << error.what();
  }
}

TEST(TensorBoard, WritesTheGoldenBytes) {
  EXPECT_EQ(hex(event_record(version_event(1.0))),
            "1800000000000000a37f4b2209000000000000f03f1a0d627261696e2e4576656e743a3286bf577a");
  EXPECT_EQ(hex(event_record(scalar_event(2.0, 7, "loss", 0.5f))),
            "1a00000000000000129bd82d09000000000000004010072a0d0a0b0a046c6f7373150000003fc33fc24a");
  // TensorBoard's own test vector: the masked checksum of a record's data is its last four bytes.
  const std::string record = event_record(
      "\x1a\x11"
      "CRC test, one two");
  EXPECT_EQ(hex(record.substr(record.size() - 4)), "8ad09457");
  // Steps that take several bytes.
  EXPECT_EQ(hex(start_event(0, 300)),
            "090000000000000000"
            "10ac02"
            "3a020801");
}

TEST(Curve, StaysBoundedAndKeepsFirstAndNewestPoint) {
  Curve curve;
  for (std::int64_t step = 1; step <= 100000; ++step)
    curve.add(step, 1.0 / static_cast<double>(step));
  curve.add(100001, std::numeric_limits<double>::infinity());
  const auto points = curve.points();
  EXPECT_LE(points.size(), Curve::kMaxPoints + 1);
  EXPECT_GE(points.size(), Curve::kMaxPoints / 2);
  EXPECT_EQ(points.front().step, 1);
  EXPECT_EQ(points.back().step, 100000);
  for (std::size_t i = 1; i < points.size(); ++i) EXPECT_LT(points[i - 1].step, points[i].step);
}

TEST(Curve, DrawsInsideThePictureWhateverTheData) {
  for (const double scale : {1e-9, 1.0, 1e9}) {
    Curve train, held_out;
    for (int step = 1; step <= 50; ++step) train.add(step, scale * (3 + std::sin(step)));
    const std::string svg = loss_curve_svg("run", train, held_out, "valid");
    expect_well_formed(svg);
    const std::size_t begin = svg.find("points=\"") + 8;
    std::istringstream points(svg.substr(begin, svg.find('"', begin) - begin));
    double x = 0, y = 0;
    char comma = 0;
    int num_points = 0;
    for (; points >> x >> comma >> y; ++num_points) {
      EXPECT_TRUE(x >= 70 && x <= 720 && y >= 56 && y <= 388) << x << " " << y;
    }
    EXPECT_EQ(num_points, 50);
  }
  expect_well_formed(loss_curve_svg("run", Curve(), Curve(), "valid"));
}

TEST(Curve, HasTheNameOfItsRunWhateverItIs) {
  const auto drawn = [](const std::string& name) {
    const std::string svg = loss_curve_svg(name, Curve(), Curve(), "valid");
    expect_well_formed(svg);
    EXPECT_EQ(find_invalid_utf8(svg), std::string::npos);
    return svg;
  };
  EXPECT_NE(drawn("lm 1").find(">lm 1</text>"), std::string::npos);
  EXPECT_NE(drawn("a<b>&\"c\"").find(">a&lt;b&gt;&amp;&quot;c&quot;</text>"), std::string::npos);
  EXPECT_NE(drawn("gr\xc3\xb6\xc3\x9f"
                  "er")
                .find(">gr\xc3\xb6\xc3\x9f"
                      "er</text>"),
            std::string::npos);
  EXPECT_NE(drawn("cut\xff").find(">cut?</text>"), std::string::npos);
  EXPECT_NE(drawn("a\nb\x1b").find(">a?b?</text>"), std::string::npos);
  drawn(std::string(89, 'x') + "\xc3\xb6");
}

}  // namespace
}  // namespace birkhoff
