// A summary of a run from its files, whether it is running or not. Changes no files. Local.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "configs/schema/config.pb.h"
#include "runtime/reporting/metrics_reader.h"
#include "runtime/reporting/run_history.h"

namespace birkhoff {

enum class RunState {
  kNew,       // no step is done
  kRunning,   // a process trains here
  kStopped,   // before its last step
  kDiverged,  // stopped, and its last loss was not finite
  kFinished,  // all steps are done and saved, or evaluate.patience ended training
};

struct RunSummary {
  std::filesystem::path folder;
  configs::Config config;                 // the one that it was last started with
  MetricsRecords records;                 // evaluations of only the last split that was evaluated
  std::vector<std::int64_t> checkpoints;  // their steps, in increasing order
  std::optional<std::string> holder;      // the process that trains here
  std::vector<Job> jobs;                  // all that trained here, the last one last
  std::optional<JobStatus> status;        // of the last job
  bool ended_early = false;               // evaluate.patience ended training
  RunState state = RunState::kNew;
  std::int64_t step = 0;     // the last step that is known to be done
  std::int64_t changed = 0;  // when its metrics were last written, in seconds since 1970
};

// Whether a folder is, or was meant to become, a run folder.
bool is_run(const std::filesystem::path& folder);

// Error(kConfig) if its configuration is wrong. Error(kStorage) if its metrics are damaged or a
// file cannot be read.
RunSummary read_run(const std::filesystem::path& folder);

const char* state_name(RunState state);

// Figures of a run; unknown ones are NaN.
struct RunFigures {
  StepRecord last_step, best_step;  // best: lowest loss
  // Step 0: none. The best is chosen among evaluations of the same split and number of tokens as
  // the last: other losses are not comparable.
  EvaluationRecord last_evaluation, best_evaluation;
  double tokens_per_second = kUnknown, step_ms = kUnknown;  // medians of the last lines
  double seconds = kUnknown;
  // `seconds` lacks evaluations and saves, which the run did not record
  bool seconds_of_steps = false;
};
RunFigures figures_of(const MetricsRecords& records);

// A time in seconds since 1970, in the local time zone.
std::string local_time(double unix_seconds);

// Totals over all jobs of the run, until now or the end of the last one.
RunTotals totals_of(const RunSummary& run);
// "2026-11-24 10:00:00: 4 ranks on a, b, step 100 to 180: exit 7, a rank was ended by signal 9".
std::string job_text(const Job& job);
// "2 restarts, 30 steps (12 s) done again; 91.5 % of 1 h 02 min was spent in steps that count". The
// run has jobs.
std::string history_text(const RunSummary& run);

// These functions return "-" for unknown values.
std::string loss_text(double loss);
std::string whole_text(double value);  // without a fraction
std::string time_text(double seconds);

}  // namespace birkhoff
