// Folders, texts and errors for the tests of data/.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "data/prepare/prepare.h"

namespace birkhoff {

// A folder that is removed at the end of a test.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    static std::atomic<int> count{0};
    // In memory if the system supports it: tests sync files thousands of times.
    const bool in_memory = access("/dev/shm", W_OK) == 0;
    path_ =
        (in_memory ? std::filesystem::path("/dev/shm") : std::filesystem::temp_directory_path()) /
        ("birkhoff_data_" + std::to_string(getpid()) + "_" + std::to_string(count++));
    std::filesystem::create_directories(path_);
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

inline void write_text(const std::string& path, std::string_view text) {
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  remove_tree(path);
  File file = File::create(path);
  file.write_all(text);
  file.close();
}

inline std::string read_text(const std::string& path) { return read_file(path, 1 << 30); }

inline PrepareOptions prepare_options(const std::string& out, std::vector<std::string> paths,
                                      const std::string& tokenizer = "bytes") {
  PrepareOptions options;
  options.out = out;
  options.paths = std::move(paths);
  options.tokenizer = tokenizer;
  return options;
}

// The message of the Error with this code that `body` must throw; it is one line and holds every
// fragment.
inline std::string expect_error(ExitCode code, const std::function<void()>& body,
                                const std::vector<std::string>& fragments = {}) {
  try {
    body();
  } catch (const Error& error) {
    const std::string what = error.what();
    EXPECT_EQ(static_cast<int>(error.code()), static_cast<int>(code)) << what;
    EXPECT_EQ(what.find('\n'), std::string::npos) << what;
    for (const std::string& fragment : fragments) {
      EXPECT_NE(what.find(fragment), std::string::npos) << "'" << fragment << "' in: " << what;
    }
    return what;
  }
  ADD_FAILURE() << "no error";
  return {};
}

}  // namespace birkhoff
