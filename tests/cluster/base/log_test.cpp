#include "cluster/base/logging/log.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <regex>
#include <sstream>

#include "cluster/base/files/file.h"
#include "tests/cluster/base/faults.h"
#include "tests/cluster/base/tally.h"
#include "tests/cluster/base/temporary_folder.h"

namespace birkhoff {
namespace {

TEST(Log, WritesOneLineAnEventToTheFileAndToStderr) {
  const TemporaryFolder folder;
  const std::string path = folder.path("log/rank-3.log");
  testing::internal::CaptureStderr();
  {
    Log log(3);
    log_warning("before {}", "opening");
    log.open(path);
    log_info("step {} loss {:.2f}", 7, 1.5);
    log_text(LogLevel::kError, "two\nlines");
  }
  const std::string err = testing::internal::GetCapturedStderr();
  const std::string time = R"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3})";
  EXPECT_TRUE(std::regex_match(
      read_file(path, 4096),
      std::regex(time + " rank 3 info: step 7 loss 1.50\n" + time + " rank 3 error: two lines\n")));
  // Only rank 0 shows information.
  EXPECT_TRUE(std::regex_match(err, std::regex(time + " rank 3 warning: before opening\n" + time +
                                               " rank 3 error: two lines\n")))
      << err;
}

TEST(Log, WorksWithoutALogAndShowsInformationOfRankZero) {
  testing::internal::CaptureStderr();
  log_info("nobody's");
  {
    Log log(0);
    log_info("rank 0's");
  }
  const std::string err = testing::internal::GetCapturedStderr();
  EXPECT_NE(err.find("rank 0 info: nobody's"), std::string::npos);
  EXPECT_NE(err.find("rank 0 info: rank 0's"), std::string::npos);
}

std::vector<std::string> lines_with(const std::string& text, const std::string& part) {
  std::vector<std::string> found;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) {
    if (line.find(part) != std::string::npos) found.push_back(line);
  }
  return found;
}

// A failed open() is an error. After a later failure the log stops using the file with one warning,
// and stderr still shows everything that it should.
TEST(Log, EveryCallMayFail) {
  Tally tally("log");
  for (const std::int64_t last : {std::int64_t{0}, kForever}) {
    bool happened = true;
    for (std::int64_t call = 0; happened; ++call) {
      for (const int error : errors_at(call)) {
        tally.attempt([&] {
          const TemporaryFolder folder;
          const std::string path = folder.path("log/rank-1.log");
          testing::internal::CaptureStderr();
          const Faults faults(call, std::max(call, last), error);
          bool opened = false;
          {
            Log log(1);
            try {
              log.open(path);
              opened = true;
            } catch (const Error& failure) {
              EXPECT_EQ(failure.code(), ExitCode::kStorage);
              faults.expect_told(failure.what());
            }
            for (int i = 0; i < 3; ++i) log_info("line {}", i);
            log_warning("seen");
          }
          happened = faults.happened();
          set_file_fault_hook({});
          const std::string err = testing::internal::GetCapturedStderr();
          EXPECT_EQ(lines_with(err, "warning: seen").size(), 1u);
          const std::vector<std::string> warnings = lines_with(err, "no longer writing");
          ASSERT_EQ(warnings.size(), opened && happened ? 1u : 0u);
          if (!warnings.empty()) faults.expect_told(warnings.front());
          if (opened && !happened) {
            EXPECT_EQ(lines_with(read_file(path, 4096), "rank 1").size(), 4u);
          }
        });
      }
    }
  }
  EXPECT_GT(tally.tried(), 10);
}

TEST(Log, InterruptedCallsAreRepeatedAndShortOnesContinued) {
  const TemporaryFolder folder;
  testing::internal::CaptureStderr();
  {
    const Disturbances disturbances;
    Log log(1);
    log.open(folder.path("rank-1.log"));
    log_info("whole");
    EXPECT_GT(disturbances.num_interrupted(), 30);
  }
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  EXPECT_EQ(lines_with(read_file(folder.path("rank-1.log"), 4096), "info: whole").size(), 1u);
}

}  // namespace
}  // namespace birkhoff
