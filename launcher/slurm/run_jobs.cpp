#include "launcher/slurm/run_jobs.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <sstream>

#include "cluster/base/error.h"
#include "configs/loader/message_text.h"
#include "launcher/processes/command_output.h"
#include "launcher/runs/run_summary.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;

constexpr std::chrono::seconds kSqueueLimit{30};

// This user's pending and running jobs. nullopt if squeue does not answer.
std::optional<std::vector<QueuedJob>> queued_jobs() {
  // %i id, %T state, %L time left, %N nodes, %r reason; an element of an array in a line of its
  // own.
  const CommandOutput output =
      output_of(squeue({"--me", "--array", "--format=%i|%T|%L|%N|%r"}), kSqueueLimit);
  if (output.code != 0) return std::nullopt;
  std::vector<QueuedJob> jobs;
  std::istringstream lines(output.out);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream fields(line);
    QueuedJob job;
    for (std::string* field : {&job.id, &job.state, &job.time_left, &job.nodes}) {
      std::getline(fields, *field, '|');
    }
    if (std::getline(fields, job.reason)) jobs.push_back(job);
  }
  return jobs;
}

}  // namespace

std::vector<QueuedJob> jobs_with(const std::vector<QueuedJob>& queue,
                                 const std::vector<std::string>& ids) {
  std::vector<QueuedJob> found;
  std::copy_if(queue.begin(), queue.end(), std::back_inserter(found), [&](const QueuedJob& job) {
    return std::find(ids.begin(), ids.end(), job.id) != ids.end();
  });
  return found;
}

RunJobs known_jobs(const fs::path& run) {
  RunJobs jobs;
  jobs.submitted = submitted_jobs(run);
  if (jobs.submitted.empty()) return jobs;
  std::vector<std::string> ids;
  for (const SubmittedJob& job : jobs.submitted) ids.push_back(job.id);
  const auto queue = queued_jobs();
  jobs.squeue_answers = queue.has_value();
  if (queue) jobs.queued = jobs_with(*queue, ids);
  return jobs;
}

RunJobs jobs_of(const fs::path& run) {
  RunJobs jobs = known_jobs(run);
  if (jobs.submitted.empty() && !is_run(run)) {
    fail(ExitCode::kUsage,
         "{}: is not a run, and nothing was submitted for it: name a run's folder",
         quoted(run.string()));
  }
  return jobs;
}

std::vector<fs::path> runs_in(const fs::path& run, const RunJobs& jobs) {
  std::vector<fs::path> runs;
  for (const SubmittedJob& job : jobs.submitted) {
    if (std::find(runs.begin(), runs.end(), job.run) == runs.end()) runs.push_back(job.run);
  }
  return runs.empty() ? std::vector<fs::path>{absolute_run(run)} : runs;
}

}  // namespace birkhoff
