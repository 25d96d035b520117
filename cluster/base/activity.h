// The activity of a rank, for the watchdog. The training thread writes it; any thread may read it.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <mutex>

namespace birkhoff {

enum class Phase : std::int32_t {
  kStart,     // before the first step: reading, building, resuming
  kStep,      // a training step
  kEvaluate,  // an evaluation
  kSave,      // waiting for a checkpoint
  kEnd,       // no more work follows
};

// Seconds of a step in which the rank itself worked instead of waiting for other ranks, by phase.
struct StepTimes {
  double data = 0;    // waiting for the loader
  double passes = 0;  // forward and backward
  double update = 0;  // clipping, the optimizer, and all else

  double busy() const { return data + passes + update; }
};

class Activity {
 public:
  struct Snapshot {
    Phase phase = Phase::kStart;
    std::int64_t step = 0;
    std::int64_t ticks = 0;  // signs of progress so far
    // Usual seconds between two signs of progress in this phase: the median step, or the longest
    // micro-batch of an evaluation; 0 if not known yet.
    double usual_seconds = 0;
    // Medians of the last kTimedSteps steps, by phase; 0 while there are fewer.
    StepTimes step_times;
    std::int64_t num_timed = 0;  // steps whose times are known
    std::int64_t sequences = 0;  // of the last one
  };

  // Begins a phase; every training step begins one. Counts as a sign of progress.
  void enter(Phase phase, std::int64_t step);
  // Counts a sign of progress inside a phase: a micro-batch is done.
  void tick();
  // Records the times of the step that is ending and its number of sequences.
  void count_step(const StepTimes& times, std::int64_t sequences);
  Snapshot snapshot() const;

  static constexpr std::size_t kTimedSteps = 20;

 private:
  using Clock = std::chrono::steady_clock;

  mutable std::mutex mutex_;
  Snapshot now_;
  Clock::time_point last_ = Clock::now();        // last sign of progress
  Clock::time_point step_begin_ = Clock::now();  // of the running step
  std::deque<double> step_seconds_;              // of the last steps
  std::deque<StepTimes> timed_;                  // of the last steps
  double longest_evaluation_tick_ = 0;
};

}  // namespace birkhoff
