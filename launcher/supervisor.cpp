#include "launcher/supervisor.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "cluster/base/error.h"

namespace birkhoff {
namespace {

constexpr int kNotStarted = 127;  // as a shell says it

volatile std::sig_atomic_t mpirun_pid = 0;

// Async-signal-safe: passes the request on. mpirun hands SIGUSR1 to its ranks.
void pass_on(int) {
  if (mpirun_pid > 0) kill(static_cast<pid_t>(mpirun_pid), SIGUSR1);
}

// Installs pass_on for the signals that ask for a save, and puts the old handlers back.
class PassSignals {
 public:
  PassSignals() {
    struct sigaction action {};
    action.sa_handler = pass_on;
    action.sa_flags = SA_RESTART;
    for (std::size_t i = 0; i < std::size(kSignals); ++i) sigaction(kSignals[i], &action, &old_[i]);
  }
  ~PassSignals() {
    mpirun_pid = 0;
    for (std::size_t i = 0; i < std::size(kSignals); ++i) sigaction(kSignals[i], &old_[i], nullptr);
  }
  PassSignals(const PassSignals&) = delete;
  PassSignals& operator=(const PassSignals&) = delete;

 private:
  static constexpr int kSignals[] = {SIGTERM, SIGINT, SIGUSR1};
  struct sigaction old_[std::size(kSignals)];
};

std::string find_in_path(const char* name) {
  const char* path = std::getenv("PATH");
  std::string folders = path != nullptr ? path : "";
  for (std::size_t begin = 0; begin <= folders.size();) {
    const std::size_t end = std::min(folders.find(':', begin), folders.size());
    const std::string candidate = folders.substr(begin, end - begin) + "/" + name;
    if (access(candidate.c_str(), X_OK) == 0) return candidate;
    begin = end + 1;
  }
  return "";
}

std::string own_path() {
  char buffer[4096];
  const ssize_t length = readlink("/proc/self/exe", buffer, sizeof buffer - 1);
  if (length <= 0) fail(ExitCode::kInternal, "readlink /proc/self/exe: {}", std::strerror(errno));
  return std::string(buffer, static_cast<std::size_t>(length));
}

std::vector<std::string> mpirun_arguments(const std::string& mpirun, int ranks,
                                          const std::vector<std::string>& arguments) {
  const int cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  // Binding off and threads shared out: mpirun's default gives each of two ranks one core and
  // LibTorch one thread.
  std::vector<std::string> line = {
      mpirun, "-n", std::to_string(ranks), "--bind-to", "none", "--oversubscribe", "-q"};
  if (geteuid() == 0) line.push_back("--allow-run-as-root");
  if (std::getenv("OMP_NUM_THREADS") == nullptr) {
    line.insert(line.end(),
                {"-x", "OMP_NUM_THREADS=" + std::to_string(std::max(1, cores / ranks))});
  } else {
    line.insert(line.end(), {"-x", "OMP_NUM_THREADS"});
  }
  // Ranks share the cores: a thread that waits for its team must not spin on one.
  if (std::getenv("OMP_WAIT_POLICY") == nullptr)
    line.insert(line.end(), {"-x", "OMP_WAIT_POLICY=passive"});
  const char* terminal = std::getenv("TERM");
  if (isatty(STDERR_FILENO) != 0 && terminal != nullptr && std::strcmp(terminal, "dumb") != 0) {
    line.insert(line.end(), {"-x", std::string(kProgressVariable) + "=bar"});
  }
  line.push_back(own_path());
  line.insert(line.end(), arguments.begin(), arguments.end());
  return line;
}

}  // namespace

int map_mpirun_status(int status, std::string& why) {
  if (WIFSIGNALED(status)) {
    why = "mpirun was ended by signal " + std::to_string(WTERMSIG(status)) +
          "; run the same command again to resume";
    return static_cast<int>(ExitCode::kPeer);
  }
  const int code = WEXITSTATUS(status);
  if (code == kNotStarted) {
    why = "mpirun could not be started: the first mpirun in PATH is not a program that runs here";
    return static_cast<int>(ExitCode::kPeer);
  }
  if (code > 128) {
    why = "a rank was ended by signal " + std::to_string(code - 128) +
          "; run the same command again to resume";
    return static_cast<int>(ExitCode::kPeer);
  }
  return code;
}

int supervise(int ranks, const std::vector<std::string>& arguments, std::ostream& err) {
  const std::string mpirun = find_in_path("mpirun");
  if (mpirun.empty()) {
    fail(ExitCode::kUsage,
         "--ranks {} needs mpirun, which is not in PATH: install Open MPI (openmpi-bin) or load "
         "its module",
         ranks);
  }
  std::vector<std::string> line = mpirun_arguments(mpirun, ranks, arguments);
  std::vector<char*> argv;
  for (std::string& part : line) argv.push_back(part.data());
  argv.push_back(nullptr);

  // Block the signals until the child is known, so that none is lost in between.
  sigset_t blocked, before;
  sigemptyset(&blocked);
  for (int signal : {SIGTERM, SIGINT, SIGUSR1}) sigaddset(&blocked, signal);
  sigprocmask(SIG_BLOCK, &blocked, &before);
  PassSignals signals;
  const pid_t parent = getpid();
  const pid_t child = fork();
  if (child < 0) fail(ExitCode::kMemory, "fork for mpirun: {}", std::strerror(errno));
  if (child == 0) {
    // Its own process group: a Ctrl-C of the terminal reaches the supervisor alone. If the
    // supervisor is killed, so is mpirun.
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent) _exit(static_cast<int>(ExitCode::kPeer));
    for (int signal : {SIGTERM, SIGINT, SIGUSR1}) std::signal(signal, SIG_DFL);
    sigprocmask(SIG_SETMASK, &before, nullptr);
    const int null = open("/dev/null", O_RDONLY);
    if (null >= 0) dup2(null, STDIN_FILENO);
    execv(argv[0], argv.data());
    _exit(kNotStarted);
  }
  mpirun_pid = child;
  sigprocmask(SIG_SETMASK, &before, nullptr);
  int status = 0;
  while (waitpid(child, &status, 0) < 0) {
    if (errno != EINTR) fail(ExitCode::kInternal, "waitpid for mpirun: {}", std::strerror(errno));
  }
  std::string why;
  const int code = map_mpirun_status(status, why);
  if (!why.empty()) err << "birkhoff: " << why << '\n';
  return code;
}

}  // namespace birkhoff
