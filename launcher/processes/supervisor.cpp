#include "launcher/processes/supervisor.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <random>
#include <thread>

#include "cluster/base/cpu.h"
#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "cluster/base/text/number_text.h"
#include "launcher/commands.h"
#include "launcher/output.h"
#include "launcher/processes/shared_memory_folder.h"

namespace birkhoff {

std::string own_path() {
  // Read once: if the file is replaced while this program runs, the link no longer names it.
  static const std::string path = [] {
    char buffer[4096];
    const ssize_t length = readlink("/proc/self/exe", buffer, sizeof buffer - 1);
    if (length <= 0) fail(ExitCode::kInternal, "readlink /proc/self/exe: {}", std::strerror(errno));
    return std::string(buffer, static_cast<std::size_t>(length));
  }();
  return path;
}

namespace {

constexpr int kNotStarted = 127;  // as shells report it
constexpr const char* kStoppedAtStart =
    "stopped on request while its ranks were starting; run the same command to continue";

// The periods of checks of a running mpirun, and of repeated requests to stop: mpirun loses a
// signal for ranks that it has not started yet.
constexpr std::chrono::milliseconds kLook{20};
constexpr std::chrono::seconds kRepeat{1};

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

// The command line of a rank.
std::vector<std::string> rank_line(const RankProgram& program,
                                   const std::vector<std::string>& arguments) {
  std::vector<std::string> line = {own_path()};
  if (!program.container.empty()) line = {"apptainer", "exec", program.container, "birkhoff"};
  line.insert(line.end(), arguments.begin(), arguments.end());
  return line;
}

int ranks_of_node(const Placement& placement) {
  const auto nodes = static_cast<int>(placement.nodes.size());
  return (placement.ranks + nodes - 1) / nodes;
}

// With too few descriptors, mpirun waits forever for files that it could not open. Open MPI 4.1
// uses about twenty for itself and up to seven per rank while it starts the rank.
void check_open_files(int ranks) {
  const rlim_t needed = 32 + rlim_t{8} * static_cast<rlim_t>(ranks);
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= needed) return;
  fail(ExitCode::kUsage,
       "--ranks {} needs {} open files for mpirun, but the limit is {}: raise it with `ulimit "
       "-n {}`",
       ranks, needed, limit.rlim_cur, needed);
}

// Without space for its files in memory mpirun waits forever. Open MPI 4.1 takes 8.1 MiB for 2
// small ranks and 9.1 MiB for 8. `folder`: this run's; empty: none could be created.
void check_shared_memory(int ranks, const std::string& folder) {
  constexpr double kMebibyte = 1 << 20;
  const char* users = std::getenv("OMPI_MCA_btl_vader_backing_directory");
  const std::string place = users != nullptr ? users : "/dev/shm";
  const std::string& measured = users != nullptr || folder.empty() ? place : folder;
  if (!path_exists(measured)) return;
  const char* transports = std::getenv("OMPI_MCA_btl");  // "self,tcp", or "^vader": all others
  if (transports != nullptr) {
    const std::string_view text = transports;
    const bool excludes = text.starts_with('^');
    if ((text.find("vader") != std::string_view::npos) == excludes) return;
  }
  const double needed = (10 + 0.25 * ranks) * kMebibyte;
  const auto free = static_cast<double>(free_bytes(measured));
  if (free >= needed) return;
  fail(ExitCode::kStorage,
       "--ranks {} needs {:.1f} MiB of shared memory, and {} has {:.1f} free: remove files that "
       "ended jobs left there, or enlarge it (containers: --shm-size)",
       ranks, needed / kMebibyte, place, free / kMebibyte);
}

// Whether all ranks run on this machine. A host file in Open MPI's variable names other machines.
bool is_here(const Placement& placement) {
  return placement.nodes.empty() && std::getenv("OMPI_MCA_orte_default_hostfile") == nullptr;
}

// mpirun that starts the ranks here, on the hosts of Open MPI's file, or on the nodes of a Slurm
// job.
std::vector<std::string> mpirun_arguments(const std::string& mpirun, const Placement& placement,
                                          const std::string& shared_folder,
                                          const std::vector<std::string>& of_rank) {
  const int cores = usable_cores(), ranks = placement.ranks;
  // Turn binding off and divide the threads: by default, mpirun gives each of two ranks one core
  // and LibTorch one thread.
  std::vector<std::string> line = {
      mpirun, "-n", std::to_string(ranks), "--bind-to", "none", "--oversubscribe", "-q"};
  if (geteuid() == 0) line.push_back("--allow-run-as-root");
  if (!placement.nodes.empty()) {
    const std::string slots = fmt::format(":{}", ranks_of_node(placement));
    line.insert(line.end(),
                {"--host", fmt::format("{}{}", fmt::join(placement.nodes, slots + ","), slots)});
    // Options of the srun by which mpirun reaches the nodes.
    const char* users = std::getenv("OMPI_MCA_plm_slurm_args");
    line.insert(line.end(), {"--mca", "plm_slurm_args",
                             fmt::format("{} --job-name={}", users == nullptr ? "" : users,
                                         placement.step_name)});
  }
  if (!is_here(placement)) line.insert(line.end(), {"-x", kJobVariable});
  if (std::getenv("OMP_NUM_THREADS") == nullptr && is_here(placement)) {
    line.insert(line.end(),
                {"-x", "OMP_NUM_THREADS=" + std::to_string(std::max(1, cores / ranks))});
  } else if (std::getenv("OMP_NUM_THREADS") != nullptr) {
    line.insert(line.end(), {"-x", "OMP_NUM_THREADS"});
  }
  const char* terminal = std::getenv("TERM");
  if (isatty(STDERR_FILENO) != 0 && terminal != nullptr && std::strcmp(terminal, "dumb") != 0) {
    line.emplace_back("-x");
    line.push_back(fmt::format("{}=bar", kProgressVariable));
  }
  line.emplace_back("-x");
  line.push_back(fmt::format("{}={}", kOutputVariable, output_is_terminal() ? "terminal" : "file"));
  for (const char* place : {"btl_vader_backing_directory", "orte_tmpdir_base"}) {
    const bool users = std::getenv((std::string("OMPI_MCA_") + place).c_str()) != nullptr;
    if (!users && !shared_folder.empty()) line.insert(line.end(), {"--mca", place, shared_folder});
  }
  line.insert(line.end(), of_rank.begin(), of_rank.end());
  return line;
}

// A step of the Slurm job on these nodes. It ends if one rank does, or if a node is lost.
std::vector<std::string> srun_arguments(const std::string& srun, const Placement& placement,
                                        const std::vector<std::string>& of_rank) {
  std::vector<std::string> line = {srun,
                                   "--mpi=pmix",
                                   "--overlap",
                                   "--kill-on-bad-exit=1",
                                   "--cpu-bind=none",
                                   "--export=ALL",  // even if sbatch got another --export
                                   "--quiet",
                                   "--job-name=" + placement.step_name,
                                   "--nodes=" + std::to_string(placement.nodes.size()),
                                   "--ntasks=" + std::to_string(placement.ranks),
                                   "--ntasks-per-node=" + std::to_string(ranks_of_node(placement)),
                                   fmt::format("--nodelist={}", fmt::join(placement.nodes, ","))};
  line.insert(line.end(), of_rank.begin(), of_rank.end());
  return line;
}

}  // namespace

int map_launcher_status(const std::string& launcher, int status, bool stop_requested,
                        std::string& why) {
  if (WIFSIGNALED(status)) {
    why = fmt::format("{} was ended by signal {}; run the same command again to resume", launcher,
                      WTERMSIG(status));
    return static_cast<int>(ExitCode::kPeer);
  }
  const int code = WEXITSTATUS(status);
  if (code == kNotStarted) {
    why = fmt::format(
        "{0} could not be started: the first {0} in PATH is not a program that runs here",
        launcher);
    return static_cast<int>(ExitCode::kPeer);
  }
  if ((code == 128 + SIGUSR1 || code == 128 + SIGTERM) && stop_requested) {
    why = kStoppedAtStart;
    return static_cast<int>(ExitCode::kRequeue);
  }
  if (code > 128) {
    why = "a rank was ended by signal " + std::to_string(code - 128) +
          "; run the same command again to resume";
    if (code == 128 + SIGKILL) {
      why +=
          "; if no user killed it, memory ran out (see dmesg): lower train.micro_batch or "
          "--ranks";
    }
    return static_cast<int>(ExitCode::kPeer);
  }
  if (code == static_cast<int>(ExitCode::kInternal)) {
    why = fmt::format(
        "{0} ended with 1; if birkhoff printed no line above, {0} itself failed: try `{0} -n 2 "
        "hostname`",
        launcher);
  }
  return code;
}

RankProgram rank_program(const LaunchOptions& options, bool in_slurm_job) {
  if (!in_slurm_job && options.launcher) {
    fail(ExitCode::kUsage, "--launcher {} needs the batch script of a Slurm job: leave it out",
         *options.launcher);
  }
  return {.by_mpirun = !in_slurm_job || options.launcher == "mpirun",
          .container = options.container,
          .launch_limit = std::chrono::seconds(options.launch_seconds)};
}

namespace {

// In the forked child: becomes mpirun.
[[noreturn]] void become_mpirun(std::vector<std::string>& line, pid_t supervisor) {
  std::vector<char*> argv;
  for (std::string& part : line) argv.push_back(part.data());
  argv.push_back(nullptr);
  setpgid(0, 0);  // Ctrl-C in the terminal reaches only the supervisor
  std::signal(SIGTERM, SIG_DFL);
  prctl(PR_SET_PDEATHSIG, SIGTERM);  // if the supervisor is killed, so is mpirun with its ranks
  if (getppid() != supervisor) _exit(static_cast<int>(ExitCode::kPeer));
  std::signal(SIGUSR1, SIG_IGN);  // until mpirun has its own handler
  unblock_signals();
  const int null = open("/dev/null", O_RDONLY);
  if (null >= 0) dup2(null, STDIN_FILENO);
  execv(argv[0], argv.data());
  _exit(kNotStarted);
}

// Looks periodically for traces of the job. A launcher may wait forever for a lost node, or for
// ranks to start.
class LostLauncher {
 public:
  LostLauncher(const RankProgram& program, const StopSignals& signals, const std::string& job)
      : program_(program), signals_(signals), job_(job) {}

  // Whether the launcher waits forever.
  bool is_late() {
    const Clock::time_point now = Clock::now();
    if (!program_.look || now < next_look_) return false;
    next_look_ = now + kLookEvery;
    const TracesOfJob traces = program_.look(job_);
    began_ = began_ || traces.began;
    if (failure_ == 0 && traces.failure != 0) {
      failure_ = traces.failure;
      noted_ = now;
    }
    if (failure_ != 0) return now >= noted_ + kTimeToEnd;
    if (signals_.received() != 0 && !asked_) {
      asked_ = true;
      give_up_ = std::min(give_up_, now + kTimeToStop);
    }
    return !began_ && now >= give_up_;  // later the ranks' watchdog ends a hang
  }
  int failure() const { return failure_; }  // 0: it is late because the ranks did not start

 private:
  using Clock = std::chrono::steady_clock;
  // kTimeToStop: after a request, for ranks that have nothing to save yet.
  static constexpr std::chrono::milliseconds kLookEvery{500}, kTimeToEnd{2000}, kTimeToStop{15000};

  const RankProgram& program_;
  const StopSignals& signals_;
  const std::string& job_;
  Clock::time_point next_look_ = Clock::now(), noted_;
  Clock::time_point give_up_ = next_look_ + program_.launch_limit;
  bool began_ = false, asked_ = false;  // asked_: to stop
  int failure_ = 0;
};

// Passes on requests to stop until mpirun has ended, and returns its waitpid status. Returns
// nullopt after two interrupts, or if it is late, while mpirun still runs.
std::optional<int> wait_for(pid_t mpirun, const StopSignals& signals, LostLauncher& lost) {
  using Clock = std::chrono::steady_clock;
  Clock::time_point next_request = Clock::now();
  while (!signals.interrupted_twice() && !lost.is_late()) {
    int status = 0;
    const pid_t ended = waitpid(mpirun, &status, WNOHANG);
    if (ended == mpirun) return status;
    if (ended < 0 && errno != EINTR) {
      fail(ExitCode::kInternal, "waitpid for mpirun: {}", std::strerror(errno));
    }
    if (signals.received() != 0 && Clock::now() >= next_request) {
      kill(mpirun, SIGUSR1);  // mpirun passes it to its ranks
      next_request = Clock::now() + kRepeat;
    }
    std::this_thread::sleep_for(kLook);
  }
  return std::nullopt;
}

// False for a process that has ended, reaped or not, or that belongs to another user: its variables
// cannot be read.
bool was_started_with(pid_t process, const std::string& variable) {
  std::ifstream environment("/proc/" + std::to_string(process) + "/environ", std::ios::binary);
  for (std::string entry; std::getline(environment, entry, '\0');) {
    if (entry == variable) return true;
  }
  return false;
}

std::vector<pid_t> marked_processes(const std::string& variable) {
  std::vector<pid_t> found;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", error)) {
    const auto process = parse_number<pid_t>(entry.path().filename().string());
    if (!process || *process == getpid()) continue;
    if (was_started_with(*process, variable)) found.push_back(*process);
  }
  return found;
}

// Kills all other processes on this machine that were started with the variable ("NAME=VALUE") or
// have inherited it, whatever their current parents are, and waits until they are gone. Returns
// those that remain after ten seconds: they are killed but wait for a file system or a device.
std::vector<pid_t> end_marked_processes(const std::string& variable) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point give_up = Clock::now() + std::chrono::seconds(10);
  for (;;) {
    const std::vector<pid_t> left = marked_processes(variable);
    for (const pid_t process : left) kill(process, SIGKILL);
    if (left.empty() || Clock::now() > give_up) return left;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

// `name`: the launcher that was late.
EndOfRanks end_of_late(const LostLauncher& lost, const std::string& name,
                       const RankProgram& program, const StopSignals& signals) {
  if (lost.failure() != 0) return {.code = lost.failure()};
  if (signals.received() != 0) {
    return {.code = static_cast<int>(ExitCode::kRequeue), .why = kStoppedAtStart};
  }
  return {
      .code = static_cast<int>(ExitCode::kPeer),
      .why = fmt::format("{} did not start the ranks within {} s (--launch-seconds), and was ended",
                         name, program.launch_limit.count())};
}

}  // namespace

EndOfRanks supervise(const Placement& placement, const RankProgram& program,
                     const std::vector<std::string>& arguments, StopSignals& signals,
                     std::ostream& err) {
  const std::string name = program.by_mpirun ? "mpirun" : "srun";
  const std::string launcher = find_in_path(name.c_str());
  if (launcher.empty()) {
    fail(ExitCode::kUsage, "--ranks {} needs {}, which is not in PATH: {}", placement.ranks, name,
         program.by_mpirun ? "install Open MPI (openmpi-bin) or load its module"
                           : "make Slurm's commands available in the job");
  }
  const std::vector<std::string> of_rank = rank_line(program, arguments);
  std::optional<SharedMemoryFolder> shared_folder;
  std::vector<std::string> line;
  if (program.by_mpirun) {
    check_open_files(placement.ranks);
    if (is_here(placement)) {  // other machines lack the folder
      shared_folder.emplace();
      check_shared_memory(placement.ranks, shared_folder->path());
    }
    line =
        mpirun_arguments(launcher, placement, shared_folder ? shared_folder->path() : "", of_rank);
  } else {
    line = srun_arguments(launcher, placement, of_rank);
  }
  signals.note_second_interrupt();
  const pid_t parent = getpid();
  std::random_device random;
  const std::string job = fmt::format("{}-{:08x}{:08x}", parent, random(), random());
  setenv(kJobVariable, job.c_str(), /*overwrite=*/1);
  const pid_t child = fork();
  if (child < 0) fail(ExitCode::kMemory, "fork for mpirun: {}", std::strerror(errno));
  if (child == 0) become_mpirun(line, parent);
  LostLauncher lost(program, signals, job);
  const std::optional<int> status = wait_for(child, signals, lost);
  if (!status) kill(child, SIGKILL);  // it may not be mpirun yet, and then lacks the mark
  const std::vector<pid_t> left = end_marked_processes(kJobVariable + ("=" + job));
  if (!left.empty()) {
    err << "birkhoff: warning: process " << left.front()
        << " does not end: it waits for a file system or a device\n";
  }
  EndOfRanks end{
      .code = 128 + SIGINT,
      .why = "interrupted twice: ended at once, without saving; run the same command again"};
  if (status) {
    end.why.clear();
    end.code = map_launcher_status(name, *status, signals.received() != 0, end.why);
  } else if (!signals.interrupted_twice()) {
    end = end_of_late(lost, name, program, signals);
  }
  end.job = job;
  if (!end.why.empty()) err << "birkhoff: " << end.why << '\n';
  return end;
}

}  // namespace birkhoff
