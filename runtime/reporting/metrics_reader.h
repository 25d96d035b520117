// The reader of a run's metrics.jsonl, for programs that look at the run from outside.
// docs/runs.md.
#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <string>
#include <vector>

#include "runtime/reporting/reports.h"

namespace birkhoff {

inline constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

// A figure that is missing from the line, or was not finite, is NaN.
struct StepRecord {
  std::int64_t step = 0;
  double loss = kUnknown;    // nats per counted target
  bool has_targets = false;  // whether the line has a loss, finite or not
  double tokens = kUnknown;
  double tokens_per_second = kUnknown, step_ms = kUnknown;  // means since the previous line
  double elapsed_seconds = kUnknown;
};

struct EvaluationRecord {
  std::int64_t step = 0;
  std::string split;
  double loss = kUnknown;
  double tokens = kUnknown;  // read
  double elapsed_seconds = kUnknown;
  FigureValues figures{};  // of the model as a whole, besides its loss
};

struct MetricsRecords {
  std::vector<StepRecord> steps;              // steps increase
  std::vector<EvaluationRecord> evaluations;  // here, too
};

// Reads the file in pieces. A record replaces all records of its step or a later one: a run that
// resumed from an earlier step wrote them again. An incomplete last line is left out: the run is
// still writing it, or ended there. Unknown keys are ignored. No file: no records. A line that is
// not a record: Error(kStorage) with its number.
MetricsRecords read_metrics(const std::filesystem::path& file);

}  // namespace birkhoff
