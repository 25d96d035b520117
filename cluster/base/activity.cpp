#include "cluster/base/activity.h"

#include <algorithm>

namespace birkhoff {
namespace {

constexpr std::size_t kRemembered = 15;  // steps in the median
constexpr std::size_t kFewest = 3;       // fewer steps have no meaningful median

double seconds_between(std::chrono::steady_clock::time_point a,
                       std::chrono::steady_clock::time_point b) {
  return std::chrono::duration<double>(b - a).count();
}

double median_of(const std::vector<StepTimes>& times, double StepTimes::*phase) {
  std::vector<double> values;
  for (const StepTimes& step : times) values.push_back(step.*phase);
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

}  // namespace

void Activity::enter(Phase phase, std::int64_t step) {
  const std::lock_guard lock(mutex_);
  const Clock::time_point now = Clock::now();
  if (now_.phase == Phase::kStep) {
    const double seconds = seconds_between(step_begin_, now);
    if (step_seconds_.size() < kRemembered) {
      step_seconds_.push_back(seconds);
    } else {
      step_seconds_[num_steps_ % kRemembered] = seconds;
    }
    ++num_steps_;
  }
  step_begin_ = last_ = now;
  now_.phase = phase;
  now_.step = step;
  ++now_.ticks;
}

void Activity::tick() {
  const std::lock_guard lock(mutex_);
  const Clock::time_point now = Clock::now();
  if (now_.phase == Phase::kEvaluate) {
    longest_evaluation_tick_ = std::max(longest_evaluation_tick_, seconds_between(last_, now));
  }
  last_ = now;
  ++now_.ticks;
}

void Activity::count_step(const StepTimes& times, std::int64_t sequences) {
  const std::lock_guard lock(mutex_);
  if (timed_.size() < kTimedSteps) {
    timed_.push_back(times);
  } else {
    timed_[static_cast<std::size_t>(now_.num_timed) % kTimedSteps] = times;
  }
  ++now_.num_timed;
  now_.sequences = sequences;
}

Activity::Snapshot Activity::snapshot() const {
  const std::lock_guard lock(mutex_);
  Snapshot snapshot = now_;
  if (now_.phase == Phase::kEvaluate) {
    snapshot.usual_seconds = longest_evaluation_tick_;
  } else if (now_.phase == Phase::kStep && step_seconds_.size() >= kFewest) {
    std::vector<double> sorted = step_seconds_;
    std::nth_element(sorted.begin(), sorted.begin() + sorted.size() / 2, sorted.end());
    snapshot.usual_seconds = sorted[sorted.size() / 2];
  }
  if (timed_.size() == kTimedSteps) {
    for (double StepTimes::*phase : {&StepTimes::data, &StepTimes::passes, &StepTimes::update}) {
      snapshot.step_times.*phase = median_of(timed_, phase);
    }
  }
  return snapshot;
}

}  // namespace birkhoff
