// System calls on files. A call is repeated if a signal interrupts it, its error names the file,
// the cause and the cure, and a test's hook can make it fail (set_file_fault_hook in file.h). For
// the implementation of file.h.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <string>

#include "cluster/base/error.h"
#include "cluster/base/files/file.h"

namespace birkhoff {

// The hook's result for the next call: 0, kShortTransfer or an errno value.
int next_fault(const char* call, const std::string& path);

// Runs transfer(n), a system call that transfers at most n of `num_bytes` bytes, or returns -1 and
// sets errno. Repeats it if it is interrupted.
template <typename Transfer>
std::int64_t retried_transfer(const char* name, const std::string& path, std::size_t num_bytes,
                              Transfer transfer) {
  constexpr std::size_t kMax = std::size_t{1} << 30;  // Linux moves at most 2 GiB per call
  for (;;) {
    std::int64_t result = -1;
    const int fault = next_fault(name, path);
    if (fault > 0) {
      errno = fault;
    } else {
      result = transfer(fault == kShortTransfer ? std::min<std::size_t>(num_bytes, 1)
                                                : std::min(num_bytes, kMax));
    }
    if (result >= 0 || errno != EINTR) return result;
  }
}

// The same for a system call that transfers no bytes.
template <typename Call>
std::int64_t retried(const char* name, const std::string& path, Call call) {
  return retried_transfer(name, path, 0, [&](std::size_t) -> std::int64_t { return call(); });
}

// Throws the Error of a call that has set errno: with `code` if the input is not what its reader
// expects, else with kStorage. `detail` follows the system's reason.
[[noreturn]] void fail_call(const char* call, const std::string& path, const std::string& detail,
                            ExitCode code = ExitCode::kStorage);

// Calls fail_call() if the result is negative.
void check_call(std::int64_t result, const char* call, const std::string& path,
                ExitCode code = ExitCode::kStorage);

// Calls fsync once: an interrupted or failed fsync is not repeated.
void sync_descriptor(int fd, const std::string& path);

}  // namespace birkhoff
