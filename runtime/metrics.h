// The figures of a run, told four ways: the terminal or plain lines, RUN/metrics.jsonl (one object
// a line, keys as below), TensorBoard events, and RUN/loss.svg. Used on rank 0 only. Files that
// cannot be written are errors at the start of a run; later they are warnings, and training goes
// on.
//
//   every metrics.every steps:
//   {"step","loss","tokens","tokens_per_second","step_ms","loader_wait_ms","learning_rate","grad_norm"}
//   each evaluation:
//   {"step","split","loss","bits_per_byte","tokens","bytes"}
//
// tokens_per_second, step_ms and loader_wait_ms (how long rank 0 waited for the loader in a step)
// are means since the last line. A figure that is not finite is null.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "runtime/evaluator.h"
#include "runtime/loss_curve.h"
#include "runtime/progress.h"
#include "runtime/telemetry_file.h"
#include "runtime/tensorboard.h"

namespace birkhoff {

std::string step_line(const StepReport& report);
std::string evaluation_line(std::int64_t step, const std::string& split,
                            const Evaluation& evaluation);

struct MetricsOptions {
  std::filesystem::path lines_path;    // metrics.jsonl; what is there is kept and drawn
  std::filesystem::path svg_path;      // rewritten at each evaluation and at the end
  std::filesystem::path event_folder;  // empty: no TensorBoard events
  std::string split = "valid";         // that is evaluated, for the picture's legend
  std::int64_t first_step = 1;         // of this process
  std::int64_t num_steps = 0;
  std::int64_t every = 10;
  bool terminal = false;  // stderr is one
};

class Metrics {
 public:
  // A damaged line in metrics.jsonl, or a file that cannot be written: Error(kStorage).
  explicit Metrics(MetricsOptions options);
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  // After each step. `step`: figures of the step; step_tokens: tokens of this step.
  void step(const StepReport& step, std::int64_t step_tokens);
  void evaluation(std::int64_t step, const std::string& split, const Evaluation& evaluation);
  // Call before writing other lines to stderr.
  void clear_bar();
  // Size of metrics.jsonl, lines that wait to be written included, for the checkpoint: a resumed
  // run cuts what is behind it.
  std::int64_t lines_bytes() const { return lines_.num_bytes(); }
  // Writes the picture and closes the files. Must be called at the end.
  void close();

 private:
  void read_curves();
  void write_svg();
  void warn(const std::string& text);

  const MetricsOptions options_;
  ProgressBar bar_;
  TelemetryFile lines_;
  std::optional<EventWriter> events_;
  Curve train_, held_out_;
  std::int64_t interval_steps_ = 0, interval_tokens_ = 0;  // since the last line
  double interval_ms_ = 0, interval_wait_ms_ = 0;
};

}  // namespace birkhoff
