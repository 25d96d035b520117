// What a user sees of a running training: a bar on a terminal, otherwise one plain line for each
// line of metrics.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

namespace birkhoff {

// Figures of a step or of the steps since the last report.
struct StepReport {
  std::int64_t step = 0;
  double loss = 0;          // nats per token, of this step, applied or not; may be not finite
  std::int64_t tokens = 0;  // trained on so far in the run
  double tokens_per_second = 0;
  double step_ms = 0;
  double loader_wait_ms = 0;  // of step_ms, at most: on a GPU the wait is beside the computation
  double learning_rate = 0;
  double grad_norm = 0;  // of the mean gradient, before clipping
};

// "12:34" or "1:02:03".
std::string duration_text(double seconds);
// One line without control characters, for instance
// "step 100/2000  loss 2.3456  left 2:03  12345 tokens/s  65.8 ms  lr 1.00e-03  norm 0.512".
std::string progress_line(const StepReport& report, std::int64_t num_steps);

// Whether the user's terminal can show a bar: stderr is one, or `birkhoff train --ranks`, between
// which and us mpirun's pipes lie, says so by the environment variable BIRKHOFF_PROGRESS=bar.
bool terminal_shows_bar();

class ProgressBar {
 public:
  // out: leads to a terminal. Draws nothing until the first draw().
  ProgressBar(std::FILE* out, std::int64_t num_steps) : out_(out), num_steps_(num_steps) {}
  // Redraws the line, cut to the terminal's width; at most ten times a second.
  void draw(const StepReport& report);
  // Removes the bar, so that other lines may be written.
  void clear();

 private:
  std::FILE* out_;
  const std::int64_t num_steps_;
  double last_drawn_s_ = -1;
  bool visible_ = false;
};

}  // namespace birkhoff
