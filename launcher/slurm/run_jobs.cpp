#include "launcher/slurm/run_jobs.h"

#include <algorithm>

#include "cluster/base/error.h"
#include "configs/loader/message_text.h"
#include "launcher/runs/run_summary.h"

namespace birkhoff {

namespace fs = std::filesystem;

RunJobs jobs_of(const fs::path& run) {
  RunJobs jobs;
  jobs.submitted = submitted_jobs(run);
  if (jobs.submitted.empty()) {
    if (is_run(run)) return jobs;
    fail(ExitCode::kUsage,
         "{}: is not a run, and nothing was submitted for it: name a run's folder",
         quoted(run.string()));
  }
  std::vector<std::string> ids;
  for (const SubmittedJob& job : jobs.submitted) ids.push_back(job.id);
  const auto queue = queued_jobs();
  jobs.squeue_answers = queue.has_value();
  if (queue) jobs.queued = jobs_with(*queue, ids);
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
