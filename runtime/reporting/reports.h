// The metrics that a run reports.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "data/scores/confusion_matrix.h"

namespace birkhoff {

// Values of a model's figures (Model::figures), by name.
using FigureValues = std::vector<std::pair<std::string, double>>;

// The figures of the model as a whole; figures of its parts have dotted names.
inline FigureValues model_figures(const FigureValues& figures) {
  FigureValues result;
  for (const auto& figure : figures) {
    if (figure.first.find('.') == std::string::npos) result.push_back(figure);
  }
  return result;
}

// Figures of a step or of the steps since the last report.
struct StepReport {
  std::int64_t step = 0;
  // Nats per counted target (for language models a token, for classifiers a sequence), of this
  // step, applied or not; may be non-finite. Unset: its batch had no target.
  std::optional<double> loss{};
  std::int64_t tokens = 0;  // trained on so far in the run, without padding
  double tokens_per_second = 0;
  double step_ms = 0;
  double loader_wait_ms = 0;  // of step_ms, at most: on a GPU the wait may overlap the computation
  double learning_rate = 0;
  double grad_norm = 0;    // of the mean gradient, before clipping
  FigureValues figures{};  // of this step
};

// What a task reports of an evaluation: its key in JSON, and the value with its unit as text, for
// instance {"bits_per_byte", 1.9, "1.9000 bits per byte"}. A count without a text is not printed.
struct TaskFigure {
  std::string name;
  double value = 0;
  std::string text;
};
struct TaskCount {
  std::string name;
  std::int64_t value = 0;
  std::string text;
};
struct TaskFigures {
  std::vector<TaskFigure> figures{};
  std::vector<TaskCount> counts{};
};

// Sums over the counted targets of each document of a split.
struct DocumentSums {
  std::vector<std::int64_t> targets;
  std::vector<double> nats;
};

// Figures of a split.
struct Evaluation {
  double loss = 0;          // nats per counted target
  std::int64_t tokens = 0;  // read, without padding
  TaskFigures task{};
  FigureValues figures{};  // of the model
  // Of a classifier. TaskFigures has its macro F1.
  std::optional<ConfusionMatrix> confusion{};
  std::optional<DocumentSums> documents{};  // if they were asked for
};

}  // namespace birkhoff
