// The jobs of a run: those in Slurm's queue, by Slurm's commands, and all that were submitted, by a
// record next to the run folder, which belongs to the run itself:
//   RUN.slurm/K/job.sh         the batch script of the K-th submission
//   RUN.slurm/K/config.txtpb   the configuration as it was resolved then (config-I.txtpb for a
//                              sweep's run I): a job reads this one, whatever becomes of the file
//   RUN.slurm/K/jobs.json      the jobs and their runs, in the order of their submission
//   RUN.slurm/K/JOB.out        what a job printed
//   RUN.slurm/K/JOB.end        its exit code and, in words, how it ended
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace birkhoff {

struct SubmittedJob {
  std::string id;                // "17", or "17_3" for an element of an array
  std::filesystem::path run;     // absolute
  std::filesystem::path output;  // file
  std::filesystem::path end;     // file; absent while the job waits or runs, and if it was killed
};

// An absolute path without a slash at its end.
std::filesystem::path absolute_run(const std::filesystem::path& run);

// The folder of the next submission for a run. Creates nothing.
std::filesystem::path next_submission(const std::filesystem::path& run);

// Writes jobs.json into the folder of a submission, durably.
void write_jobs(const std::filesystem::path& submission, const std::vector<SubmittedJob>& jobs);

struct RecordedEnd {
  int code = 0;
  std::string text;
};
// The end of the job, as its script has recorded it.
std::optional<RecordedEnd> recorded_end(const SubmittedJob& job);

// All jobs that were submitted for a run, or for the runs of a sweep in this folder, oldest first.
// None: empty. Error(kStorage) if a file is damaged.
std::vector<SubmittedJob> submitted_jobs(const std::filesystem::path& run);

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
