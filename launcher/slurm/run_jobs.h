// The jobs of a run: those submitted, and those still in Slurm's queue.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "launcher/slurm/queue.h"
#include "launcher/slurm/submissions.h"

namespace birkhoff {

struct RunJobs {
  std::vector<SubmittedJob> submitted;  // oldest first
  std::vector<QueuedJob> queued;        // pending and running
  bool squeue_answers = true;           // also if nothing was submitted: it is not asked then
};
// Error(kUsage) if the path is neither a run's folder nor one that runs were submitted for.
RunJobs jobs_of(const std::filesystem::path& run);

// The folders of runs that `run` stands for: itself or, if it is the folder of a sweep, those of
// the sweep.
std::vector<std::filesystem::path> runs_in(const std::filesystem::path& run, const RunJobs& jobs);

}  // namespace birkhoff
