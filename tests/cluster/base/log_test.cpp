#include "cluster/base/log.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <regex>

#include "cluster/base/file.h"
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
  // Information is rank 0's to show.
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

TEST(Log, GivesAFullDiskUpWithOneWarning) {
  const TemporaryFolder folder;
  testing::internal::CaptureStderr();
  {
    Log log(1);
    log.open(folder.path("rank-1.log"));
    set_file_fault_hook([](const char* call, const std::string&, std::int64_t) {
      return std::string(call) == "write" ? ENOSPC : 0;
    });
    log_info("lost");
    log_info("not tried again");
    set_file_fault_hook({});
  }
  const std::string err = testing::internal::GetCapturedStderr();
  EXPECT_NE(err.find("given up"), std::string::npos);
  EXPECT_EQ(err.find("given up"), err.rfind("given up"));
}

}  // namespace
}  // namespace birkhoff
