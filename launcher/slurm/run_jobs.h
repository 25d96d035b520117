// The jobs of a run: those submitted, and those still in Slurm's queue, by Slurm's commands.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "launcher/slurm/submissions.h"

namespace birkhoff {

struct QueuedJob {
  std::string id;         // "17", or "17_3" for an element of an array
  std::string state;      // Slurm's word: PENDING, RUNNING, COMPLETING, ...
  std::string time_left;  // of its limit, as Slurm writes it
  std::string nodes;      // a list in Slurm's words; empty while it waits
  std::string reason;     // why it waits

  // Whether it has nodes, which its processes may still be using.
  bool is_active() const { return state != "PENDING"; }
};

// The jobs with one of these ids, in the order of the queue.
std::vector<QueuedJob> jobs_with(const std::vector<QueuedJob>& queue,
                                 const std::vector<std::string>& ids);

struct RunJobs {
  std::vector<SubmittedJob> submitted;  // oldest first
  std::vector<QueuedJob> queued;        // pending and running
  bool squeue_answers = true;           // also if nothing was submitted: it is not asked then
};
// The jobs that were submitted for a run, if any.
RunJobs known_jobs(const std::filesystem::path& run);
// The same, but Error(kUsage) if the path is neither a run's folder nor one that runs were
// submitted for.
RunJobs jobs_of(const std::filesystem::path& run);

// The folders of runs that `run` stands for: itself or, if it is the folder of a sweep, those of
// the sweep.
std::vector<std::filesystem::path> runs_in(const std::filesystem::path& run, const RunJobs& jobs);

}  // namespace birkhoff
