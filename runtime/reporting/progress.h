// Console output of a training run: a bar on a terminal, otherwise one plain line per line of
// metrics.
#pragma once

#include <cstdint>
#include <cstdio>
#include <mutex>
#include <string>

#include "cluster/base/logging/log.h"
#include "runtime/reporting/reports.h"

namespace birkhoff {

// Means over the steps since the last line was written.
class StepMeans {
 public:
  // The step's report, but with means since restart() as its times and tokens_per_second.
  // step_tokens: counted targets of the step.
  StepReport add(const StepReport& step, std::int64_t step_tokens);
  void restart() { *this = {}; }

 private:
  std::int64_t steps_ = 0, tokens_ = 0;
  double ms_ = 0, wait_ms_ = 0;
};

// Seconds since some moment in the past; never goes back.
double clock_seconds();

// Whether a step gets a line: every `every`-th step and the last one do.
bool is_line_due(std::int64_t step, std::int64_t every, std::int64_t num_steps);

// "12:34" or "1:02:03".
std::string duration_text(double seconds);
// One line without control characters, for instance
// "step 100/2000  loss 2.3456  left 2:03  12345 tokens/s  65.8 ms  lr 1.00e-03  norm 0.512".
std::string progress_line(const StepReport& report, std::int64_t num_steps);

// Whether the user's terminal can show a bar: stderr is a terminal, or the environment has
// BIRKHOFF_PROGRESS=bar. `birkhoff train --ranks` sets that, because mpirun's pipes lie between the
// terminal and this process.
bool terminal_shows_bar();

// The log erases it where it writes lines of its own.
class ProgressBar final : public TerminalLine {
 public:
  // out: writes to a terminal. Draws nothing until the first draw().
  ProgressBar(std::FILE* out, std::int64_t num_steps);
  ~ProgressBar() override;
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;
  // Redraws the line, cut to the terminal's current width; at most ten times a second.
  void draw(const StepReport& report);
  void erase() override;

 private:
  std::FILE* out_;
  const std::int64_t num_steps_;
  std::mutex mutex_;  // of what follows
  double last_drawn_s_ = -1;
  bool visible_ = false;
};

}  // namespace birkhoff
