#include "cluster/base/files/sandboxed_child.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "cluster/base/error.h"
#include "cluster/base/files/file.h"

namespace birkhoff {
namespace {

using Descriptor = UniqueHandle<FileDescriptorTraits>;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;  // shadow memory takes terabytes of address space
#else
constexpr bool kSanitized = false;
#endif

void limit(decltype(RLIMIT_CPU) resource, rlim_t value) {
  const rlimit both = {value, value};
  setrlimit(resource, &both);
}

rlim_t address_space_bytes() {
  unsigned long long pages = 0;
  FILE* statm = std::fopen("/proc/self/statm", "re");
  if (statm != nullptr) {
    if (std::fscanf(statm, "%llu", &pages) != 1) pages = 0;
    std::fclose(statm);
  }
  return pages * static_cast<rlim_t>(sysconf(_SC_PAGESIZE));
}

// Runs in the child. Writes the exit code and the message of an Error to the pipe and exits without
// running destructors.
[[noreturn]] void be_child(int report, const std::function<void()>& body) {
  for (const int signal_number : {SIGSEGV, SIGBUS, SIGABRT, SIGFPE, SIGILL})
    signal(signal_number, SIG_DFL);
  const int null = open("/dev/null", O_WRONLY | O_CLOEXEC);
  dup2(null, STDOUT_FILENO);
  dup2(null, STDERR_FILENO);
  limit(RLIMIT_CORE, 0);
  limit(RLIMIT_CPU, 10);
  alarm(30);
  if (!kSanitized) limit(RLIMIT_AS, address_space_bytes() + (rlim_t{1} << 30));
  std::string message;
  try {
    body();
    message = static_cast<char>(ExitCode::kOk);
  } catch (const Error& error) {
    message = static_cast<char>(error.code()) + std::string(error.what());
  } catch (const std::exception& error) {
    message = static_cast<char>(ExitCode::kData) + std::string(error.what());
  }
  message.resize(std::min<std::size_t>(message.size(), 4096));  // a pipe takes this much at once
  const bool written =
      write(report, message.data(), message.size()) == static_cast<ssize_t>(message.size());
  _exit(written ? 0 : 1);
}

std::string read_report(int pipe_end) {
  std::string report;
  char part[4096];
  while (true) {
    const ssize_t got = read(pipe_end, part, sizeof(part));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return report;
    report.append(part, static_cast<std::size_t>(got));
  }
}

}  // namespace

void run_limited(const std::string& file, const std::function<void()>& body) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0)
    fail(ExitCode::kStorage, "{}: cannot create a pipe to check it: {}; free resources", file,
         std::strerror(errno));
  Descriptor from_child(ends[0]), to_parent(ends[1]);
  const pid_t child = fork();
  if (child < 0)
    fail(ExitCode::kMemory, "{}: cannot start a process to check it: {}; free resources", file,
         std::strerror(errno));
  if (child == 0) be_child(to_parent.get(), body);
  to_parent.reset();
  const std::string report = read_report(from_child.get());
  int status = 0;
  while (waitpid(child, &status, 0) < 0) {
    require(errno == EINTR, "waitpid");
  }
  if (report.empty()) {
    const std::string how =
        WIFSIGNALED(status) ? fmt::format("ended by signal {}", WTERMSIG(status)) : "ended early";
    fail(ExitCode::kData,
         "{}: damaged: the process that checked it {}; prepare the corpus again or give another "
         "file",
         file, how);
  }
  const auto code = static_cast<ExitCode>(report[0]);
  if (code != ExitCode::kOk) throw Error(code, report.substr(1));
}

}  // namespace birkhoff
