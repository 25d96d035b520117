// A run's metrics, reported in four ways: the terminal or plain lines, RUN/metrics.jsonl (one
// object per line; docs/metrics.md describes its keys), TensorBoard events, and RUN/loss.svg. Used
// only on rank 0. At the start of a run, a file that cannot be written is an error; later it is a
// warning, and training continues.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>

#include "runtime/reporting/loss_curve.h"
#include "runtime/reporting/progress.h"
#include "runtime/reporting/reports.h"
#include "runtime/reporting/telemetry_file.h"
#include "runtime/reporting/tensorboard.h"

namespace birkhoff {

// Lines of metrics.jsonl. elapsed_seconds: training time of the run so far.
std::string step_line(const StepReport& report, double elapsed_seconds);
std::string evaluation_line(std::int64_t step, const std::string& split,
                            const Evaluation& evaluation, double elapsed_seconds);
struct MetricsOptions {
  std::filesystem::path lines_path;    // metrics.jsonl; existing lines are kept and drawn
  std::filesystem::path svg_path;      // rewritten at each evaluation and at the end
  std::filesystem::path event_folder;  // empty: no TensorBoard events
  std::string split = "valid";         // the evaluated split, for the picture's legend
  std::int64_t first_step = 1;         // of this process
  std::int64_t num_steps = 0;
  std::int64_t every = 10;
  bool terminal = false;  // stderr is a terminal
  std::string run_name;   // for the picture
  std::function<double()> clock = clock_seconds;
};

class Metrics {
 public:
  // A damaged line in metrics.jsonl, or a file that cannot be written: Error(kStorage).
  explicit Metrics(MetricsOptions options);
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  // Call after each step. `step`: the step's figures; step_tokens: the step's tokens.
  void step(const StepReport& step, std::int64_t step_tokens);
  void evaluation(std::int64_t step, const std::string& split, const Evaluation& evaluation);
  // Training time of the run so far: the last line's in metrics.jsonl when this object was made,
  // plus the time since.
  double elapsed_seconds() const { return elapsed_before_ + options_.clock() - began_; }
  // The run's results: losses of its last step and evaluation, its time, and the mean speed since
  // this object was made.
  std::string summary() const;
  // Size of metrics.jsonl, including lines that wait to be written, for the checkpoint: a resumed
  // run cuts off what follows.
  std::int64_t lines_bytes() const { return lines_.num_bytes(); }
  // Writes the picture and closes the files. Must be called at the end.
  void close();

 private:
  void read_lines();
  void write_svg();

  const MetricsOptions options_;
  ProgressBar bar_;
  TelemetryFile lines_;
  std::optional<EventWriter> events_;
  Curve train_, held_out_;
  StepMeans means_;
  const double began_;
  double elapsed_before_ = 0;
  std::int64_t num_tokens_ = 0;  // since this object was made
  std::optional<double> last_loss_, last_held_out_loss_;
};

}  // namespace birkhoff
