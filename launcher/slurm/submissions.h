// The record of a run's submissions to Slurm, kept next to the run folder, which belongs to the run
// itself:
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

}  // namespace birkhoff
