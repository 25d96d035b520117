#include "launcher/processes/slurm_job.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <random>
#include <sstream>

#include "cluster/base/error.h"
#include "cluster/base/text/plural.h"
#include "cluster/slurm_environment.h"
#include "configs/loader/site_io.h"
#include "launcher/processes/command_output.h"
#include "runtime/reporting/run_history.h"

namespace birkhoff {
namespace {

constexpr std::chrono::seconds kCommandLimit{30}, kNodeLimit{10}, kAnswerLimit{10};
constexpr std::chrono::minutes kAskEvery{3};

std::vector<std::string> words_of(const std::string& text) {
  std::istringstream words(text);
  std::vector<std::string> result;
  for (std::string word; words >> word;) result.push_back(word);
  return result;
}

// Whether Slurm reports that the job has ended. False if Slurm does not answer.
bool has_ended(const std::string& id) {
  const CommandOutput state = output_of(squeue({"--jobs=" + id, "--format=%T"}), kCommandLimit);
  return state.code == 0 ? state.out.empty()
                         : state.err.find("Invalid job id") != std::string::npos;
}

// The end of the job, in seconds since 1970. It is computed from the remaining time, which depends
// on no time zone.
std::optional<double> end_of_job(const std::string& job) {
  const CommandOutput left = output_of(squeue({"--jobs=" + job, "--format=%L"}), kAnswerLimit);
  if (left.code != 0) return std::nullopt;
  const auto time = slurm_time(left.out.substr(0, left.out.find('\n')));  // not of "UNLIMITED"
  return time ? std::optional(unix_seconds() + static_cast<double>(time->count())) : std::nullopt;
}

}  // namespace

std::optional<SlurmJob> SlurmJob::of_environment() {
  const std::optional<std::string> id = slurm_job_id();
  const char* nodes = std::getenv("SLURM_JOB_NODELIST");
  if (!id || nodes == nullptr || slurm_step_tasks()) return std::nullopt;
  const CommandOutput names = output_of({"scontrol", "show", "hostnames", nodes}, kCommandLimit);
  std::random_device random;
  SlurmJob job{*id, words_of(names.out),
               fmt::format("birkhoff-ranks-{:08x}{:08x}", random(), random())};
  if (names.code != 0 || job.nodes.empty()) {
    fail(ExitCode::kUsage,
         "Slurm job {}: `scontrol show hostnames {}` fails: make Slurm's commands work in the job, "
         "or `unset SLURM_JOB_ID` in a shell that is not in it",
         *id, nodes);
  }
  if (has_ended(*id)) {
    fail(ExitCode::kUsage,
         "Slurm job {} has ended, but this shell still has its variables: `unset SLURM_JOB_ID` to "
         "use this machine, or start in a job",
         *id);
  }
  return job;
}

std::vector<std::string> SlurmJob::end_steps(std::size_t wanted) const {
  std::vector<std::vector<std::string>> lines;
  for (const std::string& node : nodes) {
    // srun's exit code is 0 even if the node does not answer.
    lines.push_back({"srun", "--overlap", "--nodes=1", "--ntasks=1", "--nodelist=" + node,
                     "--mpi=none", "--quiet", "echo", "here"});
  }
  const CommandOutput steps =
      output_of(squeue({"--steps", "--jobs=" + id, "--format=%i %j"}), kCommandLimit);
  std::istringstream each(steps.out);
  for (std::string step, name; each >> step && std::getline(each >> std::ws, name);) {
    if (name != step_name) continue;
    // It waits for a node that is gone, after it has reached the others.
    lines.push_back({"scancel", "--signal=KILL", step});
  }
  const std::vector<CommandOutput> outputs = outputs_of(lines, kNodeLimit, wanted);
  std::vector<std::string> responding;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    if (outputs[i].out.starts_with("here")) responding.push_back(nodes[i]);
  }
  return responding;
}

TimeLimit::TimeLimit() {
  const auto job = slurm_job_id();
  if (!job) return;
  thread_ = std::jthread(
      [this, job = *job](const std::stop_token& stop) { ask_again_and_again(stop, job); });
}

std::optional<double> TimeLimit::end() const {
  const double seconds = seconds_;
  return seconds > 0 ? std::optional(seconds) : std::nullopt;
}

void TimeLimit::ask_again_and_again(const std::stop_token& stop, const std::string& job) {
  std::mutex mutex;  // of the wait, which only the request to stop ends early
  std::condition_variable_any wakes;
  std::unique_lock lock(mutex);
  while (!stop.stop_requested()) {
    try {
      // If Slurm does not answer, its last answer stands.
      if (const std::optional<double> end = end_of_job(job)) seconds_ = *end;
    } catch (const Error&) {
      // No process can be started now; perhaps later.
    }
    wakes.wait_for(lock, stop, kAskEvery, [] { return false; });
  }
}

namespace {

int ranks_of_node(const SlurmJob& job, const PlacementPolicy& policy) {
  const int used = std::max(1, static_cast<int>(job.nodes.size()) - policy.spare_nodes);
  return (policy.ranks + used - 1) / used;
}

}  // namespace

std::size_t nodes_needed(const SlurmJob& job, const PlacementPolicy& policy) {
  const int of_node = ranks_of_node(job, policy);
  return static_cast<std::size_t>((policy.ranks + of_node - 1) / of_node);
}

std::optional<Placement> place(const SlurmJob& job, const PlacementPolicy& policy,
                               const std::vector<std::string>& responding, std::string& why) {
  const int of_node = ranks_of_node(job, policy),
            fit = std::min(policy.ranks, of_node * static_cast<int>(responding.size())),
            ranks = fit - fit % policy.multiple_of;
  if (ranks < policy.min_ranks || ranks == 0) {
    why = fmt::format("{} of {} respond, and each has {}: too few for {}", responding.size(),
                      counted(job.nodes.size(), "node"), counted(of_node, "rank"),
                      counted(policy.min_ranks, "rank"));
    return std::nullopt;
  }
  const auto needed = static_cast<std::ptrdiff_t>((ranks + of_node - 1) / of_node);
  return Placement{ranks, {responding.begin(), responding.begin() + needed}, job.step_name};
}

}  // namespace birkhoff
