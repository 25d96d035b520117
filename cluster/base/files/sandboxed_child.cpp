#include "cluster/base/files/sandboxed_child.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <new>
#include <optional>

#include "cluster/base/error.h"

namespace birkhoff {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;  // shadow memory takes terabytes of address space
#else
constexpr bool kSanitized = false;
#endif

// Requests that the child may not have read yet. They fit into the socket's buffer, so that neither
// side waits for the other to read.
constexpr std::size_t kMaxAhead = 16;
constexpr std::size_t kMaxRequestBytes = 8192;

// Precedes a request or an answer on the socket.
struct Header {
  std::int32_t code;
  std::uint32_t bytes;
};

// False if the other side is gone.
bool send_all(int socket, const void* data, std::size_t bytes) {
  const char* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t sent = send(socket, next, bytes, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return false;
    next += sent;
    bytes -= static_cast<std::size_t>(sent);
  }
  return true;
}

bool receive_all(int socket, void* data, std::size_t bytes) {
  char* next = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t got = recv(socket, next, bytes, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    next += got;
    bytes -= static_cast<std::size_t>(got);
  }
  return true;
}

bool send_message(int socket, ExitCode code, const std::string& text) {
  const Header header = {static_cast<std::int32_t>(code), static_cast<std::uint32_t>(text.size())};
  return send_all(socket, &header, sizeof header) && send_all(socket, text.data(), text.size());
}

bool receive_request(int socket, std::string& text) {
  Header header;
  if (!receive_all(socket, &header, sizeof header)) return false;
  text.resize(header.bytes);
  return receive_all(socket, text.data(), text.size());
}

// Only root may raise a hard limit, so the present one bounds both. Then setrlimit cannot fail.
void limit(decltype(RLIMIT_CPU) resource, rlim_t soft, rlim_t hard) {
  rlimit present = {RLIM_INFINITY, RLIM_INFINITY};
  getrlimit(resource, &present);
  hard = std::min(hard, present.rlim_max);
  const rlimit both = {std::min(soft, hard), hard};
  setrlimit(resource, &both);
}

bool is_crash(int signal_number) {
  constexpr std::array kCrashes = {SIGSEGV, SIGBUS, SIGABRT, SIGFPE, SIGILL, SIGXCPU};
  return std::find(kCrashes.begin(), kCrashes.end(), signal_number) != kCrashes.end();
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

rlim_t used_cpu_seconds() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<rlim_t>(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec + 1);
}

}  // namespace

LimitedChild::LimitedChild(Serve serve, ChildLimits limits)
    : serve_(std::move(serve)), limits_(limits) {}

LimitedChild::~LimitedChild() { stop(); }

void LimitedChild::start() {
  std::array<int, 2> ends = {};
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0) {
    fail(ExitCode::kStorage,
         "cannot make a socket for a process that reads files: {}; free "
         "resources",
         std::strerror(errno));
  }
  socket_.reset(ends[0]);
  UniqueHandle<FileDescriptorTraits> childs(ends[1]);
  child_ = fork();
  if (child_ < 0) {
    socket_.reset();
    fail(ExitCode::kMemory, "cannot start a process that reads files: {}; free resources",
         std::strerror(errno));
  }
  if (child_ == 0) be_child(childs.get());
}

// Runs in the child: answers requests until the parent is gone, then exits without running
// destructors.
void LimitedChild::be_child(int socket) const {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  for (const int signal_number : {SIGSEGV, SIGBUS, SIGABRT, SIGFPE, SIGILL, SIGALRM, SIGXCPU})
    signal(signal_number, SIG_DFL);
  const int null = open("/dev/null", O_WRONLY | O_CLOEXEC);
  dup2(null, STDOUT_FILENO);
  dup2(null, STDERR_FILENO);
  // Locks and sockets of the parent must not outlive it.
  const auto own = static_cast<unsigned>(socket);
  if (own > 3) close_range(3, own - 1, 0);
  close_range(own + 1, ~0u, 0);
  limit(RLIMIT_CORE, 0, 0);
  if (!kSanitized) {
    const rlim_t bytes = address_space_bytes() + static_cast<rlim_t>(limits_.more_bytes);
    limit(RLIMIT_AS, bytes, bytes);
  }
  for (std::string text; receive_request(socket, text);) {
    limit(RLIMIT_CPU, used_cpu_seconds() + static_cast<rlim_t>(limits_.cpu_seconds), RLIM_INFINITY);
    alarm(static_cast<unsigned>(limits_.wall_seconds));
    ExitCode code = ExitCode::kOk;
    try {
      text = serve_(text);
    } catch (const Error& error) {
      code = error.code();
      text = error.what();
    } catch (const std::bad_alloc&) {
      code = ExitCode::kMemory;
      text = fmt::format("needs more than {} MiB of memory", limits_.more_bytes >> 20);
    } catch (const std::exception& error) {
      code = ExitCode::kData;
      text = error.what();
    }
    alarm(0);
    if (!send_message(socket, code, text)) break;
  }
  _exit(0);
}

void LimitedChild::stop() {
  socket_.reset();
  if (child_ < 0) return;
  kill(child_, SIGKILL);
  end();
}

LimitedChild::Answer LimitedChild::end() {
  socket_.reset();
  int status = 0;
  while (waitpid(child_, &status, 0) < 0) {
    require(errno == EINTR, "waitpid");
  }
  child_ = -1;
  if (!WIFSIGNALED(status)) return {ExitCode::kData, "ended early", true};
  const int ended_by = WTERMSIG(status);
  const ExitCode code = is_crash(ended_by)    ? ExitCode::kData
                        : ended_by == SIGKILL ? ExitCode::kMemory
                                              : ExitCode::kStorage;
  std::string how = fmt::format("ended by signal {}", ended_by);
  if (ended_by == SIGXCPU)
    how = fmt::format("took more than {} s of processor time", limits_.cpu_seconds);
  if (ended_by == SIGALRM) how = fmt::format("took more than {} s", limits_.wall_seconds);
  return {code, how, true};
}

LimitedChild::Answer LimitedChild::receive() {
  Header header;
  if (!receive_all(socket_.get(), &header, sizeof header)) return end();
  // It could not have had more in its memory. A parser of a malicious file may make it say so.
  if (header.bytes > limits_.more_bytes) {
    stop();
    return {ExitCode::kData, fmt::format("announced an answer of {} bytes", header.bytes), true};
  }
  Answer answer{static_cast<ExitCode>(header.code), std::string(header.bytes, '\0')};
  if (!receive_all(socket_.get(), answer.text.data(), answer.text.size())) return end();
  return answer;
}

void LimitedChild::answer(const std::vector<std::string>& requests,
                          const std::function<void(std::size_t, Answer)>& take) {
  std::size_t sent = 0;
  std::optional<std::size_t> repeated;
  try {
    for (std::size_t i = 0; i < requests.size(); ++i) {
      if (child_ < 0) {
        start();
        sent = i;
      }
      for (; sent < std::min(requests.size(), i + kMaxAhead); ++sent) {
        require(requests[sent].size() <= kMaxRequestBytes, "size of a request");
        if (!send_message(socket_.get(), ExitCode::kOk, requests[sent])) break;
      }
      Answer answer = receive();
      if (answer.ended && answer.code != ExitCode::kData && repeated != i) {
        repeated = i--;
        continue;
      }
      take(i, std::move(answer));
    }
  } catch (...) {
    stop();  // its next answers would be those to requests of this call
    throw;
  }
}

const char* LimitedChild::Answer::cure() const {
  return code == ExitCode::kMemory ? "free memory" : "find out what delays or ends processes here";
}

std::string LimitedChild::Answer::damage(const std::string& path) const {
  if (ended && code != ExitCode::kData) {
    fail(code, "{}: the process that read it {}, twice; {}, then start the command again", path,
         text, cure());
  }
  if (ended) return fmt::format("{}: damaged: the process that read it {}", path, text);
  if (code == ExitCode::kOk) return "";
  if (code == ExitCode::kMemory) return fmt::format("{}: {}", path, text);
  if (code == ExitCode::kData) return text;
  throw Error(code, text);
}

std::string LimitedChild::Answer::strange(const std::string& path) const {
  return fmt::format("{}: damaged: the process that read it answered {} strange bytes", path,
                     text.size());
}

LimitedChild::Answer LimitedChild::answer(const std::string& request) {
  Answer only;
  answer({request}, [&](std::size_t, Answer answer) { only = std::move(answer); });
  return only;
}

void run_limited(const std::string& file, const std::function<void()>& body) {
  LimitedChild child([&](const std::string&) {
    body();
    return std::string();
  });
  const LimitedChild::Answer answer = child.answer("");
  if (answer.ended && answer.code != ExitCode::kData) {
    fail(answer.code, "{}: the process that checked it {}, twice; {}, then start again", file,
         answer.text, answer.cure());
  }
  if (answer.ended) {
    fail(ExitCode::kData,
         "{}: damaged: the process that checked it {}; prepare the corpus again or give another "
         "file",
         file, answer.text);
  }
  if (answer.code == ExitCode::kMemory)
    fail(ExitCode::kData, "{}: damaged: {}; give another file", file, answer.text);
  if (answer.code != ExitCode::kOk) throw Error(answer.code, answer.text);
}

}  // namespace birkhoff
