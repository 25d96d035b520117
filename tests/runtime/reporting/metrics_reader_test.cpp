#include "runtime/reporting/metrics_reader.h"

#include <gmock/gmock.h>

#include <cmath>
#include <fstream>

#include "cluster/base/error.h"
#include "runtime/reporting/metrics.h"
#include "tests/cluster/base/temporary_folder.h"

namespace birkhoff {
namespace {

using testing::HasSubstr;

class MetricsReaderTest : public testing::Test {
 protected:
  MetricsRecords read(const std::string& text) {
    std::ofstream(file_, std::ios::binary) << text;
    return read_metrics(file_);
  }

  std::string error(const std::string& text) {
    try {
      read(text);
    } catch (const Error& refused) {
      EXPECT_EQ(refused.code(), ExitCode::kStorage);
      return refused.what();
    }
    return "";
  }

  const TemporaryFolder folder_;
  const std::filesystem::path file_ = folder_.path("metrics.jsonl");
};

TEST_F(MetricsReaderTest, ReadsWhatMetricsWrites) {
  StepReport report;
  report.step = 10;
  report.loss = 0.1 + 0.2;
  report.tokens = 1000;
  report.tokens_per_second = 12345.5;
  report.step_ms = 81.25;
  report.grad_norm = std::nan("");
  const Evaluation evaluation{
      .loss = 1.25, .tokens = 400, .task = {{{"bits_per_byte", 1.8, ""}}, {{"bytes", 1600, ""}}}};
  const MetricsRecords records =
      read(step_line(report, 1.5) + evaluation_line(10, "valid", evaluation, 1.5));
  ASSERT_EQ(records.steps.size(), 1u);
  EXPECT_EQ(records.steps[0].step, 10);
  EXPECT_EQ(records.steps[0].loss, 0.1 + 0.2) << "every bit";
  EXPECT_EQ(records.steps[0].tokens, 1000);
  EXPECT_EQ(records.steps[0].tokens_per_second, 12345.5);
  EXPECT_EQ(records.steps[0].step_ms, 81.25);
  ASSERT_EQ(records.evaluations.size(), 1u);
  EXPECT_EQ(records.evaluations[0].split, "valid");
  EXPECT_EQ(records.evaluations[0].loss, 1.25);
  EXPECT_EQ(records.evaluations[0].figures, (FigureValues{{"bits_per_byte", 1.8}}));
}

TEST_F(MetricsReaderTest, OldLinesNewKeysNullAndNothing) {
  EXPECT_TRUE(read_metrics(folder_.path("nowhere")).steps.empty());
  EXPECT_TRUE(read("").steps.empty());
  const MetricsRecords records = read(
      "{\"step\":1,\"loss\":null}\r\n"
      " { \"step\" : 2 , \"loss\" : -2.5e-1, \"elapsed_seconds\": 7.5, \"host\": \"a{b\"} \n"
      "{\"step\":3}\n");
  ASSERT_EQ(records.steps.size(), 3u);
  EXPECT_TRUE(std::isnan(records.steps[0].loss));
  EXPECT_TRUE(std::isnan(records.steps[0].elapsed_seconds));
  EXPECT_EQ(records.steps[1].loss, -0.25);
  EXPECT_EQ(records.steps[1].elapsed_seconds, 7.5);
  EXPECT_TRUE(std::isnan(records.steps[2].loss));
}

TEST_F(MetricsReaderTest, TheStartOfALastLineIsLeftOut) {
  EXPECT_EQ(read("{\"step\":1,\"loss\":2}\n{\"step\":2,\"lo").steps.size(), 1u);
  EXPECT_EQ(read("{\"step\":1,\"loss\":2}\n{\"step\":2,\"loss\":2}").steps.size(), 1u);
}

// Cut off from step 3 on, resumed there, and evaluated again.
TEST_F(MetricsReaderTest, RecordsTakeThePlaceOfLaterOnes) {
  const MetricsRecords records = read(
      "{\"step\":2,\"loss\":9}\n{\"step\":2,\"split\":\"valid\",\"loss\":8}\n"
      "{\"step\":4,\"loss\":1}\n{\"step\":4,\"split\":\"valid\",\"loss\":1}\n"
      "{\"step\":6,\"loss\":1}\n"
      "{\"step\":3,\"loss\":7}\n"
      "{\"step\":4,\"loss\":6}\n{\"step\":4,\"split\":\"valid\",\"loss\":5}\n"
      "{\"step\":4,\"split\":\"valid\",\"loss\":4}\n");
  std::vector<std::pair<std::int64_t, double>> steps, evaluations;
  for (const StepRecord& record : records.steps) steps.emplace_back(record.step, record.loss);
  for (const EvaluationRecord& record : records.evaluations) {
    evaluations.emplace_back(record.step, record.loss);
  }
  EXPECT_THAT(steps,
              testing::ElementsAre(testing::Pair(2, 9), testing::Pair(3, 7), testing::Pair(4, 6)));
  EXPECT_THAT(evaluations, testing::ElementsAre(testing::Pair(2, 8), testing::Pair(4, 4)));
}

TEST_F(MetricsReaderTest, LinesAcrossPiecesOfTheFile) {
  std::string text;
  for (int step = 1; text.size() < (3 << 20); ++step) {
    text += "{\"step\":" + std::to_string(step) + ",\"loss\":" + std::to_string(step) + ".5}\n";
  }
  const MetricsRecords records = read(text);
  for (std::size_t i = 0; i < records.steps.size(); ++i) {
    ASSERT_EQ(records.steps[i].step, static_cast<std::int64_t>(i) + 1);
    ASSERT_EQ(records.steps[i].loss, static_cast<double>(i) + 1.5);
  }
  EXPECT_GT(records.steps.size(), 100000u);
}

TEST_F(MetricsReaderTest, WhatIsNoRecordIsNamedByItsLine) {
  const std::string good = "{\"step\":1,\"loss\":2}\n";
  for (const std::string bad : {"",
                                "{}",
                                "[1]",
                                "null",
                                "{\"loss\":2}",
                                "{\"step\":null}",
                                "{\"step\":1.5}",
                                "{\"step\":-1}",
                                "{\"step\":1e300}",
                                "{\"step\":nan}",
                                "{\"step\":inf}",
                                "{\"step\":+1}",
                                "{\"step\":.5}",
                                "{\"step\":1,}",
                                "{\"step\":1 \"loss\":2}",
                                "{\"step\":1,\"loss\":NaN}",
                                "{\"step\":1,\"loss\":1e999}",
                                "{\"step\":1}}",
                                "{\"step\":1",
                                "{\"step\":1,\"a\":{}}",
                                "{step:1}",
                                "{\"step\":\"1\"}",
                                "{\"step\":1}{\"step\":2}"}) {
    EXPECT_THAT(error(good + bad + "\n" + good),
                HasSubstr("metrics.jsonl:2: not a line of metrics"))
        << bad;
  }
  EXPECT_THAT(error(good + std::string(3 << 20, 'x')), HasSubstr(":2: not a line"));
  EXPECT_THAT(error(std::string(100, '\0') + "\n"), HasSubstr(":1: not a line"));
}

}  // namespace
}  // namespace birkhoff
