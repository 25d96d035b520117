// What the files of a run say about it, whether it runs or not. Changes nothing there. Local.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "configs/config.pb.h"
#include "runtime/reporting/metrics_reader.h"

namespace birkhoff {

enum class RunState {
  kNew,       // no step is done
  kRunning,   // a process trains here
  kStopped,   // before its last step
  kDiverged,  // and its last loss was not finite
  kFinished,  // all steps are done and saved
};

struct RunSummary {
  std::filesystem::path folder;
  configs::Config config;                 // that it was last started with
  MetricsRecords records;                 // evaluations of one split, the last
  std::vector<std::int64_t> checkpoints;  // their steps, going up
  std::optional<std::string> holder;      // the process that trains here
  RunState state = RunState::kNew;
  std::int64_t step = 0;     // the last that is known to be done
  std::int64_t changed = 0;  // when its metrics were last written, in seconds since 1970
};

// Whether a folder is, or was to become, a run's.
bool is_run(const std::filesystem::path& folder);

// Error(kConfig): its configuration. Error(kStorage): its metrics are damaged, or a file cannot be
// read.
RunSummary read_run(const std::filesystem::path& folder);

const char* state_name(RunState state);

// Figures of a run; what is not known is NaN.
struct RunFigures {
  StepRecord last_step, best_step;                          // best: least loss
  EvaluationRecord last_evaluation, best_evaluation;        // step 0: none
  double tokens_per_second = kUnknown, step_ms = kUnknown;  // medians of the last lines
  double seconds = kUnknown;
  bool seconds_of_steps = false;  // without evaluations and saves: of a run that recorded no more
};
RunFigures figures_of(const MetricsRecords& records);

// "-" for what is not known.
std::string loss_text(double loss);
std::string whole_text(double value);  // without a fraction
std::string time_text(double seconds);

}  // namespace birkhoff
