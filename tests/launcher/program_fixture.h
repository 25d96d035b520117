// Tests of the program in a folder of the test suite's own.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "cluster/base/error.h"
#include "tests/launcher/child.h"

namespace birkhoff {

class ProgramTest : public testing::Test {
 protected:
  // The folder becomes the working directory.
  // Call them in SetUpTestSuite() and TearDownTestSuite().
  static void make_folder(const char* name) {
    setenv("OMP_NUM_THREADS", "1", 1);
    folder_ = new TemporaryFolder(name);
    std::filesystem::current_path(folder_->path());
  }
  static void remove_folder() {
    std::filesystem::current_path("/");
    delete folder_;
  }

  static Finished birkhoff(const std::vector<std::string>& arguments) {
    return run_child({.line = birkhoff_line(arguments)});
  }
  // The standard output of a command that succeeds.
  static std::string out_of(const std::vector<std::string>& arguments) {
    const Finished finished = birkhoff(arguments);
    EXPECT_EQ(finished.code, 0) << finished.err;
    return finished.out;
  }
  // The command ends with the code, and its one line holds the message.
  static void expect_refused(const std::vector<std::string>& arguments, ExitCode code,
                             const std::string& message) {
    const Finished finished = birkhoff(arguments);
    EXPECT_EQ(finished.code, static_cast<int>(code)) << finished.err;
    EXPECT_EQ(finished.out, "");
    EXPECT_EQ(std::count(finished.err.begin(), finished.err.end(), '\n'), 1) << finished.err;
    EXPECT_THAT(finished.err, testing::HasSubstr(message));
  }

 private:
  static inline TemporaryFolder* folder_ = nullptr;
};

}  // namespace birkhoff
