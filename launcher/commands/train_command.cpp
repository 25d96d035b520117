#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <thread>
#include <vector>

#include "cluster/base/cpu.h"
#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "cluster/base/gpu/device.h"
#include "cluster/base/text/plural.h"
#include "configs/loader/config_io.h"
#include "launcher/commands.h"
#include "launcher/doctor/examination.h"
#include "launcher/processes/ranks.h"
#include "launcher/processes/restarts.h"
#include "launcher/processes/supervisor.h"
#include "launcher/runs/train_checks.h"
#include "runtime/checkpoint/commit.h"
#include "runtime/checkpoint/run_folder.h"
#include "runtime/reporting/run_history.h"
#include "runtime/stopping/stop_request.h"
#include "runtime/train_run.h"

namespace birkhoff {
namespace {

// Finds all errors that can be found before MPI starts, including errors of this machine's devices
// and threads.
configs::Config check_here(const TrainArguments& arguments, int ranks) {
  configs::Config config = check_before_start(
      {arguments.config, arguments.settings, arguments.run, arguments.fresh, ranks});
  if (config.device() == configs::Config::cuda) count_cuda_devices();
  if (config.train().invariant().shards() > 0) {
    check_threads("train.invariant.threads", config.train().invariant().threads(),
                  ExitCode::kConfig);
  }
  return config;
}

// A text in memory, as a file that processes on this machine can open while this object exists.
class FileInMemory {
 public:
  explicit FileInMemory(const std::string& text) : fd_(memfd_create("text", MFD_CLOEXEC)) {
    if (fd_.get() < 0) fail(ExitCode::kMemory, "memfd_create: {}", std::strerror(errno));
    File file = File::open_for_append(path());
    file.write_all(text);
    file.close();
  }
  std::string path() const { return fmt::format("/proc/{}/fd/{}", getpid(), fd_.get()); }

 private:
  UniqueHandle<FileDescriptorTraits> fd_;
};

// The code of a lost rank or a hang that the job has noted in the run's history; else 0. In all
// other cases its ranks end by themselves or, if ranks differed, continue.
int noted_failure(const std::filesystem::path& history, const std::string& id) {
  const std::vector<Job> jobs = read_history(history);
  if (jobs.empty() || jobs.back().start.id != id || !jobs.back().end) return 0;
  const int code = jobs.back().end->code;
  const bool lost =
      code == static_cast<int>(ExitCode::kPeer) || code == static_cast<int>(ExitCode::kHang);
  return lost ? code : 0;
}

// `holder`: the fencing number of the run's holder before the job. Rank 0 takes the folder once all
// ranks run. A file that cannot be read at the moment must not end a job that trains.
TracesOfJob traces_of(const RunPaths& paths, std::int64_t holder, const std::string& id) {
  try {
    return {.began = Lease::newest_number(paths.root) > holder,
            .failure = noted_failure(paths.history(), id)};
  } catch (const Error&) {
    return {};
  }
}

// The file-system error that ended the ranks may occur here, too: then the last known state stands.
void unless_storage_fails(const std::function<void()>& look) {
  try {
    look();
  } catch (const Error&) {
  }
}

// A cause that keeps ranks from starting takes longer to pass than one that ends them.
void wait_before_relaunch(int restarts_in_a_row, const StopSignals& signals) {
  constexpr int kMaxDoublings = 5;
  const auto until = std::chrono::steady_clock::now() +
                     std::chrono::seconds(1 << std::min(restarts_in_a_row - 1, kMaxDoublings));
  while (signals.received() == 0 && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
}

// A lost rank may hold the folder while it waits for a file system, even after it was killed.
void wait_for_folder(const RunPaths& paths) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  unless_storage_fails([&] {
    while (lock_holder(paths.lock().string()) && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
  });
}

bool has_job(const std::vector<Job>& jobs, const std::string& id) {
  return std::any_of(jobs.begin(), jobs.end(), [&](const Job& job) { return job.start.id == id; });
}

// A job that can never be placed would be requeued forever.
void check_placement(const TrainArguments& arguments, const configs::Config& config, int ranks,
                     const std::optional<SlurmJob>& slurm) {
  if (!slurm && (arguments.spare_nodes > 0 || arguments.min_ranks)) {
    fail(ExitCode::kUsage,
         "--spare-nodes and --min-ranks need the batch script of a Slurm job: leave them out");
  }
  if (arguments.min_ranks.value_or(ranks) > ranks) {
    fail(ExitCode::kUsage, "--min-ranks {} is above --ranks {}: lower it", *arguments.min_ranks,
         ranks);
  }
  const int tensor = config.mesh().tensor();
  if (arguments.min_ranks && *arguments.min_ranks % tensor != 0) {
    fail(ExitCode::kUsage, "--min-ranks {} is not a multiple of mesh.tensor {}: choose one that is",
         *arguments.min_ranks, tensor);
  }
  if (slurm && arguments.spare_nodes >= static_cast<int>(slurm->nodes.size())) {
    fail(ExitCode::kUsage, "--spare-nodes {} leaves none of the job's {}: lower it",
         arguments.spare_nodes, counted(slurm->nodes.size(), "node"));
  }
}

// The arguments of the ranks' command line, without --fresh.
std::vector<std::string> line_of_ranks(const TrainArguments& arguments,
                                       const std::optional<FileInMemory>& resolved) {
  std::vector<std::string> line = {"train", resolved ? resolved->path() : arguments.config, "--run",
                                   arguments.run};
  if (!resolved) {
    for (const std::string& setting : arguments.settings) {
      line.insert(line.end(), {"--set", setting});
    }
  }
  return line;
}

// Runs this command line on ranks, which read the same configuration, until the run is finished or
// must not be started again. A pipe can be read only once, so its ranks read the resolved
// configuration instead.
int train_on_ranks(const TrainArguments& arguments, const configs::Config& config, int ranks,
                   StopSignals& signals, std::ostream& err) {
  std::optional<FileInMemory> resolved;
  if (is_pipe(arguments.config)) resolved.emplace(config_text(config));
  const std::vector<std::string> line = line_of_ranks(arguments, resolved);
  const RunPaths paths{arguments.run};
  const std::optional<SlurmJob> slurm = SlurmJob::of_environment();
  check_placement(arguments, config, ranks, slurm);
  const PlacementPolicy policy{ranks, arguments.min_ranks.value_or(ranks), arguments.spare_nodes,
                               config.mesh().tensor()};
  Restarts restarts(arguments.restarts);
  std::string why;
  std::optional<Placement> placement =
      slurm ? place(*slurm, policy, slurm->nodes, why) : std::optional(Placement{ranks});
  std::int64_t holder = 0, saved_step = 0;
  RankProgram program = rank_program(arguments.launch, slurm.has_value());
  program.look = [&](const std::string& job) { return traces_of(paths, holder, job); };
  const auto requeue = [&](const std::string& reason) {
    err << "birkhoff: " << reason << std::endl;
    return static_cast<int>(ExitCode::kRequeue);
  };
  for (bool fresh = arguments.fresh; placement;) {
    if (signals.received() != 0) {
      return requeue(
          "stopped on request before the ranks were started; run the same command to "
          "continue");
    }
    unless_storage_fails([&] { holder = Lease::newest_number(paths.root); });
    std::vector<std::string> of_job = line;
    if (fresh) of_job.emplace_back("--fresh");
    const EndOfRanks end = supervise(*placement, program, of_job, signals, err);
    if (end.code != static_cast<int>(ExitCode::kOk)) {
      const std::string problem = note_lost_job(paths.history(), paths.status(), end.job, end.code,
                                                end.why.empty() ? "the ranks ended" : end.why);
      if (!problem.empty()) err << "birkhoff: warning: " << problem << '\n';
    }
    if (!is_failure(end.code)) return end.code;
    const bool began = traces_of(paths, holder, end.job).began;
    unless_storage_fails([&] {
      // A job that has noted its start has moved the earlier run aside before.
      fresh = fresh && !has_job(read_history(paths.history()), end.job);
      const auto saved = list_checkpoints(paths.checkpoints());
      saved_step = saved.empty() ? 0 : saved.rbegin()->first;
    });
    if (signals.received() != 0) {
      // The request was made before ranks were lost.
      if (!slurm || !Restarts::may_pass(end.code) || signals.interrupted_twice()) return end.code;
      return requeue(
          fmt::format("exit code {} in a job that was asked to stop: the next job resumes "
                      "from the checkpoint of step {}",
                      end.code, saved_step));
    }
    why.clear();
    const bool again = restarts.again(end.code, saved_step, why);
    if (!why.empty()) err << "birkhoff: " << why << std::endl;
    if (!again) return end.code;
    if (!began) wait_before_relaunch(restarts.in_a_row(), signals);
    if (slurm) {
      placement = place(*slurm, policy, slurm->end_steps(nodes_needed(*slurm, policy)), why);
    }
    wait_for_folder(paths);
  }
  return requeue(why);  // a new job may get other nodes
}

// The number of threads that a rank computes with.
int rank_threads(const configs::Config& config, const World& world) {
  const configs::Invariant& invariant = config.train().invariant();
  return invariant.shards() > 0 ? invariant.threads() : threads_of_rank(world.cores());
}

int train_in_world(const configs::Config& config, const TrainArguments& arguments, World& world,
                   const StopSignals& signals, std::ostream& err) {
  compute_on_cpu(rank_threads(config, world));
  const auto end_hanging_job = [&](const Diagnosis& diagnosis) {
    err << "birkhoff: " << diagnosis.text << std::endl;
    world.abort(static_cast<int>(diagnosis.code));
  };
  const Examination examination =
      examine({.world = world, .threads = rank_threads(config, world), .configuration = config},
              Cost::kInstant);
  const bool fails = examination.verdict() == Verdict::kFail;
  if (world.rank() == 0) {
    for (const auto& line : examination.lines(fails ? Verdict::kFail : Verdict::kWarn)) {
      err << "birkhoff: " << (fails ? "" : "warning: ") << line << std::endl;
    }
  }
  if (fails) return static_cast<int>(examination.code());
  const char* job = std::getenv(kJobVariable);
  std::optional<TimeLimit> limit;  // one rank asks Slurm
  if (world.rank() == 0) limit.emplace();
  StopRequest stop(signals, [&] { return limit ? limit->end() : std::nullopt; });
  const Outcome outcome = run_training(config, arguments.run, arguments.fresh, world,
                                       {stop, end_hanging_job, job == nullptr ? "" : job});
  return static_cast<int>(outcome == Outcome::kRequeue ? ExitCode::kRequeue : ExitCode::kOk);
}

}  // namespace

int train_command(const TrainArguments& arguments, std::ostream&, std::ostream& err) {
  // Exists from the start until MPI has ended: a request to stop must never reach the default
  // handler, which would end a rank without a message.
  StopSignals signals;
  const int ranks = ranks_to_run_on(arguments.ranks);
  configs::Config config;
  check_before_ranks([&] { config = check_here(arguments, ranks); });
  if (arguments.ranks) return train_on_ranks(arguments, config, ranks, signals, err);
  return run_in_world(
      [&](World& world) { return train_in_world(config, arguments, world, signals, err); }, err);
}

}  // namespace birkhoff
