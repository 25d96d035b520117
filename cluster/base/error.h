// Errors a user can cause or must see: one exception type, one line, one documented exit code.
#pragma once

#include <fmt/core.h>

#include <source_location>
#include <stdexcept>
#include <string>

namespace birkhoff {

// Exit codes of the program; docs/runbook.md says what to do for each. 128 + n: ended by signal n.
enum class ExitCode : int {
  kOk = 0,
  kInternal = 1,    // a broken invariant: a bug in birkhoff
  kUsage = 2,       // command line or environment
  kConfig = 3,      // configuration text or values
  kData = 4,        // corpus missing, damaged or unsuitable
  kCheckpoint = 5,  // no valid checkpoint where one is needed, or one that does not fit
  kStorage = 6,     // file system: no space, I/O error, no permission
  kPeer = 7,        // a rank or the network is lost
  kHang = 8,        // no progress
  kNumerical = 9,   // non-finite values, and the policy is to stop
  kMemory = 10,     // out of memory
  kRequeue = 75,    // state is saved; start the same command again
};

// what() is one line: what failed, which value, where, and what to do.
class Error : public std::runtime_error {
 public:
  Error(ExitCode code, const std::string& what) : std::runtime_error(what), code_(code) {}
  ExitCode code() const noexcept { return code_; }

 private:
  ExitCode code_;
};

// Throws Error(code, formatted text).
template <typename... Args>
[[noreturn]] void fail(ExitCode code, fmt::format_string<Args...> format, Args&&... args) {
  throw Error(code, fmt::format(format, std::forward<Args>(args)...));
}

// Throws std::invalid_argument(formatted text) if `condition` holds. For values from a file: the
// text says what is wrong, and a caller adds which file it is and what to do.
template <typename... Args>
void reject_if(bool condition, fmt::format_string<Args...> format, Args&&... args) {
  if (condition) throw std::invalid_argument(fmt::format(format, std::forward<Args>(args)...));
}

// Throws Error(kInternal) with the caller's file and line unless `condition` holds. For broken
// invariants, never for bad input.
inline void require(bool condition, const char* what,
                    std::source_location where = std::source_location::current()) {
  if (!condition) {
    fail(ExitCode::kInternal, "internal error at {}:{}: {}", where.file_name(), where.line(), what);
  }
}

}  // namespace birkhoff
