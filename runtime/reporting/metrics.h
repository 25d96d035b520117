// The figures of a run, reported in four ways: the terminal or plain lines, RUN/metrics.jsonl (one
// object a line; docs/metrics.md describes its keys), TensorBoard events, and RUN/loss.svg. Used on
// rank 0 only. Files that cannot be written are errors at the start of a run; later they are
// warnings, and training goes on.
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

// Lines of metrics.jsonl. elapsed_seconds: that the run has trained so far.
std::string step_line(const StepReport& report, double elapsed_seconds);
std::string evaluation_line(std::int64_t step, const std::string& split,
                            const Evaluation& evaluation, double elapsed_seconds);
// Seconds since some moment in the past; never goes back.
double clock_seconds();

struct MetricsOptions {
  std::filesystem::path lines_path;    // metrics.jsonl; what is there is kept and drawn
  std::filesystem::path svg_path;      // rewritten at each evaluation and at the end
  std::filesystem::path event_folder;  // empty: no TensorBoard events
  std::string split = "valid";         // that is evaluated, for the picture's legend
  std::int64_t first_step = 1;         // of this process
  std::int64_t num_steps = 0;
  std::int64_t every = 10;
  bool terminal = false;  // stderr is one
  std::string run_name;   // for the picture
  std::function<double()> clock = clock_seconds;
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
  // Training time of the run so far: what the last line of metrics.jsonl had when this began, and
  // the time since.
  double elapsed_seconds() const { return elapsed_before_ + options_.clock() - began_; }
  // What the run came to: losses of its last step and evaluation, its time, and the mean speed
  // since this began.
  std::string summary() const;
  // Size of metrics.jsonl, lines that wait to be written included, for the checkpoint: a resumed
  // run cuts what is behind it.
  std::int64_t lines_bytes() const { return lines_.num_bytes(); }
  // Writes the picture and closes the files. Must be called at the end.
  void close();

 private:
  void read_lines();
  void write_svg();
  void warn(const std::string& text);

  const MetricsOptions options_;
  ProgressBar bar_;
  TelemetryFile lines_;
  std::optional<EventWriter> events_;
  Curve train_, held_out_;
  StepMeans means_;
  const double began_;
  double elapsed_before_ = 0;
  std::int64_t num_tokens_ = 0;  // since this began
  std::optional<double> last_loss_, last_held_out_loss_;
};

}  // namespace birkhoff
