// The past of a run. RUN/history.jsonl has a line for each job that began to train, and one for its
// end. Lines are only added, each by one durable write. RUN/status.json shows the progress of the
// running job. docs/runs.md describes the keys. Both files are by-products: a failed write is a
// warning.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "cluster/health/slow_ranks.h"

namespace birkhoff {

// Times are seconds since 1970.

struct JobStart {
  double time = 0;
  std::int64_t step = 0;  // of the checkpoint that it resumes from; 0: the start
  int ranks = 0;
  std::vector<std::string> hosts;  // in the order of ranks, each once
  std::string program;             // version
  std::string scheduler_job;       // "slurm 17"; empty: none
  std::string id;                  // of this job; a launcher that started it knows it, too
};

struct JobEnd {
  double time = 0;
  std::int64_t step = 0;    // the last step that is known to be done
  double step_seconds = 0;  // spent in the steps of this job
  int code = 0;             // exit code; -1: not known
  std::string reason;       // one line
};

// A rank was found to be slow.
struct SlowEpisode {
  double time = 0;
  SlowRank slow;
};

struct Job {
  JobStart start;
  std::optional<JobEnd> end = {};  // unknown while it runs, or if it was killed
  std::vector<SlowEpisode> slow = {};
};

// Jobs of the file in their order. No file: none. Lines that are not a job's are ignored, because a
// crash may have left the last one incomplete.
std::vector<Job> read_history(const std::filesystem::path& file);

// The progress of a job.
struct JobStatus {
  double time = 0;
  std::int64_t step = 0, steps = 0, saved_step = 0;  // saved_step: of the newest checkpoint
  double tokens_per_second = 0, step_seconds = 0;
  double save_seconds = 0;  // longest time from a save to its commit; 0: none yet
  std::string host;
  std::int64_t process = 0;
};

// No file, or none that can be read: nullopt.
std::optional<JobStatus> read_status(const std::filesystem::path& file);

// Totals over all jobs of a run.
struct RunTotals {
  std::int64_t restarts = 0;
  std::int64_t lost_steps = 0;   // done, and done again after a restart
  double lost_seconds = 0;       // that these steps took at first
  double seconds = 0;            // from the first start until `now`
  double effective_seconds = 0;  // spent in steps that were not lost
};
// `now`: the time until which the run is counted: its end, if it has ended.
RunTotals totals_of(const std::vector<Job>& jobs, const std::optional<JobStatus>& status,
                    double now);

// Adds the end of the last job to `history`, for a job that could not write it itself; does nothing
// if there is one already, or if `id` is neither empty nor that job's. The job's progress is taken
// from `status` and, without `id`, also its time. An error of the file system is returned as one
// line, not thrown.
std::string note_lost_job(const std::filesystem::path& history, const std::filesystem::path& status,
                          const std::string& id, int code, const std::string& reason);

// Adds a slow rank of the job `id` to `history`; errors as note_lost_job's. Any thread of the
// process that holds the run's lock may call it.
std::string note_slow_rank(const std::filesystem::path& history, const std::string& id,
                           const SlowEpisode& episode);

// Writes both files. For rank 0, which holds the run's lock; one object for each job.
class RunHistory {
 public:
  // Notes the start, after the end of the previous job if that job could not write it.
  RunHistory(std::filesystem::path history, std::filesystem::path status, JobStart start,
             std::int64_t num_steps);

  // Call after each step; `tokens` are the step's. Writes the status at most every other second.
  void step(std::int64_t step, double step_ms, std::int64_t tokens);
  // The newest checkpoint, and the seconds that saving it took; 0: not known.
  void saved(std::int64_t step, double seconds);
  // The job ends. Further calls do nothing.
  void end(int code, const std::string& reason);

 private:
  using Clock = std::chrono::steady_clock;
  void write_status();

  std::filesystem::path history_, status_file_;
  std::string id_;
  JobStatus status_;
  double recent_ms_ = 0;  // since the last write
  std::int64_t recent_tokens_ = 0;
  Clock::time_point next_write_;
  bool ended_ = false, warned_ = false;
};

double unix_seconds();
// Of this process, as JobStart has it.
std::string scheduler_job();

}  // namespace birkhoff
