// What a rank is doing and since when, for the watchdog: written by the thread that trains, read by
// any.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <vector>

namespace birkhoff {

enum class Phase : std::int32_t {
  kStart,     // before the first step: reading, building, resuming
  kStep,      // a training step
  kEvaluate,  // an evaluation
  kSave,      // waiting for a checkpoint
  kEnd,       // nothing more is to come
};

class Activity {
 public:
  struct Snapshot {
    Phase phase = Phase::kStart;
    std::int64_t step = 0;
    std::int64_t ticks = 0;  // signs of progress so far
    // Seconds that a sign of progress of this phase usually takes to come: the median step, the
    // longest micro-batch of an evaluation; 0 where that is not known yet.
    double usual_seconds = 0;
  };

  // A phase begins (a step: each step anew). A sign of progress.
  void enter(Phase phase, std::int64_t step);
  // A sign of progress inside a phase: a micro-batch is done.
  void tick();
  Snapshot snapshot() const;

 private:
  using Clock = std::chrono::steady_clock;

  mutable std::mutex mutex_;
  Snapshot now_;
  Clock::time_point last_ = Clock::now();        // sign of progress
  Clock::time_point step_begin_ = Clock::now();  // of the step that runs
  std::vector<double> step_seconds_;             // of the last steps, a ring
  std::size_t num_steps_ = 0;
  double longest_evaluation_tick_ = 0;
};

}  // namespace birkhoff
