// System calls on files: repeated when a signal interrupts them, reported with file, cause and
// cure, and failing in tests where a hook says so (file.h, set_file_fault_hook). For the
// implementation of file.h.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <string>

#include "cluster/base/error.h"
#include "cluster/base/files/file.h"

namespace birkhoff {

// What the hook wants for the next call: 0, kShortTransfer or an errno value.
int next_fault(const char* call, const std::string& path);

// Runs a system call that returns -1 and sets errno on failure, again if it was interrupted.
template <typename Call>
std::int64_t retried(const char* name, const std::string& path, Call call) {
  for (;;) {
    std::int64_t result = -1;
    if (const int fault = next_fault(name, path); fault > 0) {
      errno = fault;
    } else {
      result = call();
    }
    if (result >= 0 || errno != EINTR) return result;
  }
}

// The same for calls that transfer bytes: transfer(n) moves at most n.
template <typename Transfer>
std::int64_t retried_transfer(const char* name, const std::string& path, std::size_t num_bytes,
                              Transfer transfer) {
  constexpr std::size_t kMost = std::size_t{1} << 30;  // Linux moves at most 2 GiB a call
  for (;;) {
    std::int64_t result = -1;
    const int fault = next_fault(name, path);
    if (fault > 0) {
      errno = fault;
    } else {
      result = transfer(fault == kShortTransfer ? std::min<std::size_t>(num_bytes, 1)
                                                : std::min(num_bytes, kMost));
    }
    if (result >= 0 || errno != EINTR) return result;
  }
}

// Error of the call that has set errno: with `code` where the input is not what its reader expects,
// else kStorage. detail follows the system's reason.
[[noreturn]] void fail_call(const char* call, const std::string& path, const std::string& detail,
                            ExitCode code = ExitCode::kStorage);

// fail_call() if the result is negative.
void check_call(std::int64_t result, const char* call, const std::string& path,
                ExitCode code = ExitCode::kStorage);

// fsync.
void sync_descriptor(int fd, const std::string& path);

}  // namespace birkhoff
