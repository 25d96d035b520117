// What metrics.jsonl tells of a run, for whoever looks at it from outside. docs/runs.md.
#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <string>
#include <vector>

namespace birkhoff {

inline constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

// A figure that the line does not have, or that was not finite, is NaN.
struct StepRecord {
  std::int64_t step = 0;
  double loss = kUnknown;  // nats per token
  double tokens = kUnknown;
  double tokens_per_second = kUnknown, step_ms = kUnknown;  // means since the line before
  double elapsed_seconds = kUnknown;
};

struct EvaluationRecord {
  std::int64_t step = 0;
  std::string split;
  double loss = kUnknown, bits_per_byte = kUnknown;
  double elapsed_seconds = kUnknown;
};

struct MetricsRecords {
  std::vector<StepRecord> steps;              // steps go up
  std::vector<EvaluationRecord> evaluations;  // and here
};

// Reads the file in pieces. A record takes the place of all with its step or a later one: a run
// that was resumed from an earlier step wrote them again. The start of a last line that is not
// complete is left out: the run is being written, or was ended there. Unknown keys are ignored. No
// file: no records. A line that is no record: Error(kStorage) with its number.
MetricsRecords read_metrics(const std::filesystem::path& file);

}  // namespace birkhoff
