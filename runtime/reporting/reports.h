// The figures that a run reports.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace birkhoff {

// Values of a model's figures (Model::figures), by name.
using FigureValues = std::vector<std::pair<std::string, double>>;

// Figures of a step or of the steps since the last report.
struct StepReport {
  std::int64_t step = 0;
  double loss = 0;          // nats per token, of this step, applied or not; may be non-finite
  std::int64_t tokens = 0;  // trained on so far in the run
  double tokens_per_second = 0;
  double step_ms = 0;
  double loader_wait_ms = 0;  // of step_ms, at most: on a GPU the wait may overlap the computation
  double learning_rate = 0;
  double grad_norm = 0;    // of the mean gradient, before clipping
  FigureValues figures{};  // of this step
};

// Figures of a split.
struct Evaluation {
  double loss = 0;           // nats per counted target
  double bits_per_byte = 0;  // total nats / ln 2 / raw bytes
  std::int64_t tokens = 0;   // counted targets
  std::int64_t bytes = 0;
  FigureValues figures{};
};

}  // namespace birkhoff
