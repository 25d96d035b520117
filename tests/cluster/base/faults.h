// File calls that fail one after the other, and the message that users must get.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "cluster/base/files/file.h"

namespace birkhoff {

inline constexpr std::int64_t kForever = INT64_MAX;

// BIRKHOFF_FAULTS=all: every call fails with every error. By default the errors take turns.
inline bool all_faults() {
  const char* which = std::getenv("BIRKHOFF_FAULTS");
  return which != nullptr && std::string_view(which) == "all";
}

// The errors to try at a call.
inline std::vector<int> errors_at(std::int64_t call) {
  static const std::vector<int> kErrors = {EIO, ENOSPC, EDQUOT, EROFS};
  if (all_faults()) return kErrors;
  return {kErrors[static_cast<std::size_t>(call) % kErrors.size()]};
}

// While it exists, file calls number first, ..., last (0 is the next one) fail with `error`.
class Faults {
 public:
  Faults(std::int64_t first, std::int64_t last, int error) : error_(error) {
    set_file_fault_hook(
        [this, first, last](const char* call, const std::string& path, std::int64_t nth) {
          const std::lock_guard lock(mutex_);
          num_calls_ = nth + 1;
          if (nth < first || nth > last) return 0;
          if (failed_path_.empty()) {
            failed_call_ = call;
            failed_path_ = path;
          }
          return error_;
        });
  }
  ~Faults() { set_file_fault_hook({}); }
  Faults(const Faults&) = delete;
  Faults& operator=(const Faults&) = delete;

  std::int64_t num_calls() const { return num_calls_; }
  bool happened() const { return !failed_path_.empty(); }
  // The first call that failed.
  const std::string& failed_call() const { return failed_call_; }
  const std::string& failed_path() const { return failed_path_; }

  // Expects one line that names the call, file, reason and cure of the first failure.
  void expect_told(const std::string& message) const {
    EXPECT_THAT(message, testing::HasSubstr(failed_call_ + " of '" + failed_path_ +
                                            "' failed: " + std::strerror(error_)));
    const char* cure = error_ == EIO     ? "check it, and write elsewhere"
                       : error_ == EROFS ? "check owner and permissions"
                                         : "free space or quota there";
    EXPECT_THAT(message, testing::HasSubstr(cure));
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  }

 private:
  const int error_;
  std::mutex mutex_;
  std::int64_t num_calls_ = 0;
  std::string failed_call_, failed_path_;
};

// While it exists, every call except fsync, which is never repeated, is interrupted once, and reads
// and writes transfer one byte.
class Disturbances {
 public:
  Disturbances() {
    set_file_fault_hook([this](const char* call, const std::string&, std::int64_t) {
      const std::lock_guard lock(mutex_);
      interrupted_ = !interrupted_ && std::string_view(call) != "fsync";
      num_interrupted_ += interrupted_;
      return interrupted_ ? EINTR : kShortTransfer;
    });
  }
  ~Disturbances() { set_file_fault_hook({}); }
  Disturbances(const Disturbances&) = delete;
  Disturbances& operator=(const Disturbances&) = delete;
  std::int64_t num_interrupted() const { return num_interrupted_; }

 private:
  std::mutex mutex_;
  bool interrupted_ = false;
  std::int64_t num_interrupted_ = 0;
};

// While it exists, the system lets no file of this process grow beyond `bytes`: writes are cut
// short, then fail with EFBIG.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : old_handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &old_);
    const rlimit limited = {bytes, old_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limited);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &old_);
    std::signal(SIGXFSZ, old_handler_);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  void (*old_handler_)(int);
  rlimit old_ = {};
};

}  // namespace birkhoff
