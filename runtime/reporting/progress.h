// What a user sees of a running training: a bar on a terminal, otherwise one plain line for each
// line of metrics.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

#include "runtime/reporting/reports.h"

namespace birkhoff {

// Means over the steps since the last line that was written of them.
class StepMeans {
 public:
  // The step's report with means since restart() for its times and tokens_per_second. step_tokens:
  // counted targets of the step.
  StepReport add(const StepReport& step, std::int64_t step_tokens);
  void restart() { *this = {}; }

 private:
  std::int64_t steps_ = 0, tokens_ = 0;
  double ms_ = 0, wait_ms_ = 0;
};

// Whether a line is written of a step: each `every` of them, and the last.
bool is_line_due(std::int64_t step, std::int64_t every, std::int64_t num_steps);

// A line for each that is due, in the log file of a rank that writes no metrics: its own times.
class StepLog {
 public:
  StepLog(std::int64_t every, std::int64_t num_steps) : every_(every), num_steps_(num_steps) {}
  void step(const StepReport& step, std::int64_t step_tokens);

 private:
  const std::int64_t every_, num_steps_;
  StepMeans means_;
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
  // Redraws the line, cut to the width that the terminal has by now; at most ten times a second.
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
