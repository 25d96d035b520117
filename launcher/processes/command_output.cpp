#include "launcher/processes/command_output.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>

#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "cluster/base/unique_handle.h"

namespace birkhoff {
namespace {

constexpr std::chrono::seconds kForTheOthers{2};

using Descriptor = UniqueHandle<FileDescriptorTraits>;

struct Running {
  pid_t process = -1;
  Descriptor out, err;  // a pipe; a file in memory
  CommandOutput result = {};
  bool at_end = false;  // it has closed the pipe
};

// Ranks call it, too, and a fork may corrupt memory that MPI has registered with a network device:
// posix_spawn copies no page of this process.
Running start(const std::vector<std::string>& line) {
  std::vector<char*> argv;
  for (const std::string& part : line) argv.push_back(const_cast<char*>(part.c_str()));
  argv.push_back(nullptr);
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) fail(ExitCode::kMemory, "pipe: {}", std::strerror(errno));
  Descriptor read_end(ends[0]), write_end(ends[1]), err(memfd_create("stderr", MFD_CLOEXEC));
  if (err.get() < 0) fail(ExitCode::kMemory, "memfd_create: {}", std::strerror(errno));
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&files, write_end.get(), STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&files, err.get(), STDERR_FILENO);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t none;  // programs expect that no signal is blocked
  sigemptyset(&none);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setpgroup(&attributes, 0);  // so that all of it can be killed
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETPGROUP);
  Running running{-1, std::move(read_end), std::move(err)};
  const int error =
      posix_spawnp(&running.process, argv[0], &files, &attributes, argv.data(), environ);
  posix_spawn_file_actions_destroy(&files);
  posix_spawnattr_destroy(&attributes);
  if (error == EAGAIN || error == ENOMEM) {
    fail(ExitCode::kMemory, "start of {}: {}", line[0], std::strerror(error));
  }
  if (error != 0) running.process = -1;  // there is no such program
  return running;
}

// Raises the limit of open files, as far as this user may, so that `more` can be opened.
void raise_open_files(std::size_t more) {
  constexpr rlim_t kInUse = 256;
  rlimit limit{};
  const rlim_t needed = kInUse + more;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= needed) return;
  limit.rlim_cur = std::min(needed, limit.rlim_max);
  setrlimit(RLIMIT_NOFILE, &limit);
}

// The text that a program wrote to its file in memory, up to the length that a message needs.
std::string text_of(const Descriptor& file) {
  std::string text(std::size_t{64} << 10, '\0');
  const ssize_t count = pread(file.get(), text.data(), text.size(), 0);
  text.resize(static_cast<std::size_t>(std::max<ssize_t>(count, 0)));
  return text;
}

// Reads the available bytes. Returns false at the end.
bool read_more(Running& command) {
  char buffer[4096];
  const ssize_t count = read(command.out.get(), buffer, sizeof buffer);
  if (count > 0) command.result.out.append(buffer, static_cast<std::size_t>(count));
  return count > 0 || (count < 0 && errno == EINTR);
}

void finish(Running& command, bool too_slow) {
  if (command.process < 0) {
    command.result.code = 127;
    return;
  }
  if (too_slow) kill(-command.process, SIGKILL);
  int status = 0;
  while (waitpid(command.process, &status, 0) < 0 && errno == EINTR) {
  }
  if (!too_slow) {
    command.result.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  command.result.err = text_of(command.err);
}

}  // namespace

std::vector<CommandOutput> outputs_of(const std::vector<std::vector<std::string>>& lines,
                                      std::chrono::milliseconds limit, std::size_t wanted) {
  using Clock = std::chrono::steady_clock;
  Clock::time_point deadline = Clock::now() + limit;
  std::vector<Running> commands;
  raise_open_files(2 * lines.size());
  try {
    for (const auto& line : lines) commands.push_back(start(line));
  } catch (...) {
    for (Running& command : commands) finish(command, /*too_slow=*/true);
    throw;
  }
  for (;;) {
    std::vector<pollfd> waiting;  // poll ignores -1
    for (const Running& command : commands) {
      waiting.push_back({command.at_end ? -1 : command.out.get(), POLLIN, 0});
    }
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    const bool done = std::all_of(commands.begin(), commands.end(),
                                  [](const Running& command) { return command.at_end; });
    if (done || left <= 0) break;
    if (poll(waiting.data(), waiting.size(),
             static_cast<int>(std::min<std::int64_t>(left, 1000))) <= 0)
      continue;
    for (std::size_t i = 0; i < commands.size(); ++i) {
      if (waiting[i].revents != 0) commands[i].at_end = !read_more(commands[i]);
    }
    const auto printed = static_cast<std::size_t>(std::count_if(
        commands.begin(), commands.end(), [](const Running& c) { return !c.result.out.empty(); }));
    if (printed >= wanted) {
      deadline = std::min(deadline, Clock::now() + kForTheOthers);
      wanted = std::numeric_limits<std::size_t>::max();
    }
  }
  for (Running& command : commands) finish(command, !command.at_end);
  std::vector<CommandOutput> results;
  for (Running& command : commands) results.push_back(std::move(command.result));
  return results;
}

CommandOutput output_of(const std::vector<std::string>& line, std::chrono::milliseconds limit) {
  return outputs_of({line}, limit)[0];
}

std::vector<std::string> squeue(const std::vector<std::string>& options) {
  std::vector<std::string> line = {"env"};
  for (const char* filter : {"ACCOUNT", "LICENSES", "NAMES", "PARTITION", "QOS", "STATES", "USERS"})
    line.insert(line.end(), {"-u", fmt::format("SQUEUE_{}", filter)});
  line.insert(line.end(), {"squeue", "--noheader"});
  line.insert(line.end(), options.begin(), options.end());
  return line;
}

}  // namespace birkhoff
