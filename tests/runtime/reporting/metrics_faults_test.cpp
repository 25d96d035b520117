// Metrics on a file system that fails. At the start of a run that is an error, later a warning;
// training continues, and missing records are written once writing works again.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <sstream>

#include "runtime/reporting/metrics.h"
#include "tests/cluster/base/faults.h"
#include "tests/cluster/base/tally.h"
#include "tests/cluster/base/temporary_folder.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

StepReport usual_report(std::int64_t step) {
  StepReport report;
  report.step = step;
  report.loss = 3.0 / static_cast<double>(step);
  report.step_ms = 50;
  return report;
}

// With one bit per byte.
Evaluation usual_evaluation(double loss) {
  return {.loss = loss,
          .tokens = 10,
          .task = {{{"bits_per_byte", 1, "1.0000 bits per byte"}}, {{"bytes", 40, "40 bytes"}}},
          .figures = {}};
}

// The files that a run of six steps and two evaluations leaves in its folder.
struct Told {
  std::string lines, svg;
  std::vector<std::string> events;  // without their times

  friend bool operator==(const Told&, const Told&) = default;
};

// The whole records of the only event file; checks their checksums. Ignores what follows the last
// whole one.
std::vector<std::string> events_in(const fs::path& folder) {
  constexpr std::size_t kTimeBytes = 9;
  std::vector<std::string> events;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().string().find("tfevents") == std::string::npos) continue;
    const std::string bytes = contents(entry.path());
    for (std::size_t at = 0; at + 12 <= bytes.size();) {
      std::uint64_t length = 0;
      std::memcpy(&length, bytes.data() + at, sizeof length);
      if (at + 16 + length > bytes.size()) break;
      const std::string event = bytes.substr(at + 12, length);
      EXPECT_EQ(bytes.substr(at, 16 + length), event_record(event)) << "a record is damaged";
      events.push_back(event.substr(kTimeBytes));
      at += 16 + length;
    }
  }
  return events;
}

Told told_in(const fs::path& folder) {
  return {contents(folder / "metrics.jsonl"), contents(folder / "loss.svg"), events_in(folder)};
}

class MetricsFaults : public testing::Test {
 protected:
  MetricsFaults() {
    undisturbed_ = run("undisturbed", [](std::int64_t) {});
  }
  ~MetricsFaults() override { set_file_fault_hook({}); }

  // A run in a new folder; at_step(0) is called before the metrics are opened, at_step(n) before
  // step n is reported.
  Told run(const std::string& name, const std::function<void(std::int64_t)>& at_step) {
    const fs::path folder = folder_.path(name);
    fs::create_directory(folder);
    MetricsOptions options;
    options.lines_path = folder / "metrics.jsonl";
    options.svg_path = folder / "loss.svg";
    options.event_folder = folder;
    options.num_steps = 6;
    options.every = 1;
    options.clock = [] { return 0.0; };
    testing::internal::CaptureStderr();
    started_ = false;
    try {
      at_step(0);
      Metrics metrics(options);
      started_ = true;
      for (std::int64_t step = 1; step <= 6; ++step) {
        at_step(step);
        metrics.step(usual_report(step), 100);
        if (step % 3 == 0) metrics.evaluation(step, "valid", usual_evaluation(2.75));
        lines_bytes_ = metrics.lines_bytes();
      }
      metrics.close();
    } catch (const Error& error) {
      EXPECT_FALSE(started_) << "ended a run: " << error.what();
      EXPECT_EQ(error.code(), ExitCode::kStorage);
      error_ = error.what();
    }
    warnings_.clear();
    std::istringstream err(testing::internal::GetCapturedStderr());
    for (std::string line; std::getline(err, line);) {
      if (line.find(" warning: ") != std::string::npos) warnings_.push_back(line);
    }
    return told_in(folder);
  }

  const TemporaryFolder folder_;
  Told undisturbed_;
  // Of the last run.
  bool started_ = false;
  std::string error_;
  std::vector<std::string> warnings_;
  std::int64_t lines_bytes_ = 0;
};

TEST_F(MetricsFaults, EveryCallMayFailOnce) {
  ASSERT_EQ(undisturbed_.events.size(), 2 + 6 * 5 + 2 * 2u);
  Tally tally("metrics, once");
  bool happened = true;
  for (std::int64_t call = 0; happened; ++call) {
    for (const int error : errors_at(call)) {
      const std::string name = "once-" + std::to_string(call) + "-" + std::to_string(error);
      tally.attempt([&] {
        std::optional<Faults> faults;
        const Told told = run(name, [&](std::int64_t step) {
          if (step == 0) faults.emplace(call, call, error);
        });
        happened = faults->happened();
        if (!happened) {
          EXPECT_EQ(told, undisturbed_);
          EXPECT_TRUE(warnings_.empty());
        } else if (!started_) {
          faults->expect_told(error_);
        } else {
          ASSERT_FALSE(warnings_.empty());
          EXPECT_LE(warnings_.size(), 2u) << "it failed, it works again";
          faults->expect_told(warnings_.front());
          EXPECT_EQ(told.lines, undisturbed_.lines);
          EXPECT_EQ(told.events, undisturbed_.events);
          // The last picture may have met the fault; then the one before it is whole.
          EXPECT_TRUE(told.svg.ends_with("</svg>\n")) << told.svg;
        }
      });
    }
  }
  EXPECT_GT(tally.tried(), 60);
}

TEST_F(MetricsFaults, EveryCallMayFailFromThereOn) {
  Tally tally("metrics, from there on");
  bool happened = true;
  for (std::int64_t call = 0; happened; ++call) {
    for (const int error : errors_at(call)) {
      const std::string name = "on-" + std::to_string(call) + "-" + std::to_string(error);
      tally.attempt([&] {
        std::optional<Faults> faults;
        const Told told = run(name, [&](std::int64_t step) {
          if (step == 0) faults.emplace(call, kForever, error);
        });
        happened = faults->happened();
        faults.reset();
        EXPECT_TRUE(undisturbed_.lines.starts_with(told.lines)) << told.lines;
        EXPECT_TRUE(
            std::equal(told.events.begin(), told.events.end(), undisturbed_.events.begin()));
        if (!started_) return;
        // Two files warn when they fail and of what is missing at the end; three pictures.
        EXPECT_LE(warnings_.size(), 2 * 2 + 3u);
        EXPECT_EQ(lines_bytes_, static_cast<std::int64_t>(undisturbed_.lines.size()));
        // A run can still continue in the folder.
        MetricsOptions again;
        again.lines_path = folder_.path(name) + "/metrics.jsonl";
        again.svg_path = folder_.path(name) + "/loss.svg";
        Metrics(again).close();
      });
    }
  }
  EXPECT_GT(tally.tried(), 60);
}

TEST_F(MetricsFaults, InterruptedCallsAreRepeatedAndShortOnesContinued) {
  std::optional<Disturbances> disturbances;
  EXPECT_EQ(run("disturbed",
                [&](std::int64_t step) {
                  if (step == 0) disturbances.emplace();
                }),
            undisturbed_);
  EXPECT_GT(disturbances->num_interrupted(), 100);
  EXPECT_TRUE(warnings_.empty());
}

// The system's own limit: lines and events break off anywhere, and are whole in the end.
TEST_F(MetricsFaults, ADiskThatIsFullForAWhile) {
  Tally tally("metrics, limits of file sizes for a while");
  for (rlim_t limit = 0; limit < 2100; limit += all_faults() ? 1 : 23) {
    tally.attempt([&] {
      std::optional<FileSizeLimit> limited;
      const Told told = run("full-" + std::to_string(limit), [&](std::int64_t step) {
        if (step == 2) limited.emplace(limit);
        if (step == 5) limited.reset();
      });
      limited.reset();
      EXPECT_EQ(told, undisturbed_);
      for (const std::string& warning : warnings_) {
        EXPECT_THAT(warning, testing::AnyOf(HasSubstr("ulimit -f"), HasSubstr("written again")));
      }
    });
  }
}

TEST_F(MetricsFaults, WhatWaitsIsBounded) {
  const std::string path = folder_.path("bounded");
  std::vector<std::string> warnings;
  TelemetryFile file(File::open_for_append(path),
                     [&](const std::string& text) { warnings.push_back(text); });
  const std::string record(1 << 20, 'x');
  {
    const Faults faults(0, kForever, ENOSPC);
    for (int i = 0; i < 20; ++i) file.append(record);
  }
  EXPECT_EQ(file.num_bytes(), static_cast<std::int64_t>(TelemetryFile::kMaxWaitingBytes));
  file.append("");
  ASSERT_EQ(warnings.size(), 2u);
  EXPECT_THAT(warnings[0], HasSubstr("No space left"));
  EXPECT_THAT(warnings[1], HasSubstr("4 records lost"));
  EXPECT_EQ(file_size(path), file.num_bytes());
}

}  // namespace
}  // namespace birkhoff
