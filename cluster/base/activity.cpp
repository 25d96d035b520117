#include "cluster/base/activity.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace birkhoff {
namespace {

constexpr std::size_t kRemembered = 15;  // steps in the median
constexpr std::size_t kFewest = 3;       // fewer steps have no meaningful median

double seconds_between(std::chrono::steady_clock::time_point a,
                       std::chrono::steady_clock::time_point b) {
  return std::chrono::duration<double>(b - a).count();
}

double median_of(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

template <typename T>
void remember(const T& value, std::size_t most, std::deque<T>& last) {
  last.push_back(value);
  if (last.size() > most) last.pop_front();
}

}  // namespace

void Activity::enter(Phase phase, std::int64_t step) {
  const std::lock_guard lock(mutex_);
  const Clock::time_point now = Clock::now();
  if (now_.phase == Phase::kStep) {
    remember(seconds_between(step_begin_, now), kRemembered, step_seconds_);
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
  remember(times, kTimedSteps, timed_);
  ++now_.num_timed;
  now_.sequences = sequences;
}

Activity::Snapshot Activity::snapshot() const {
  const std::lock_guard lock(mutex_);
  Snapshot snapshot = now_;
  if (now_.phase == Phase::kEvaluate) {
    snapshot.usual_seconds = longest_evaluation_tick_;
  } else if (now_.phase == Phase::kStep && step_seconds_.size() >= kFewest) {
    snapshot.usual_seconds = median_of({step_seconds_.begin(), step_seconds_.end()});
  }
  if (timed_.size() == kTimedSteps) {
    for (double StepTimes::*phase : {&StepTimes::data, &StepTimes::passes, &StepTimes::update}) {
      std::vector<double> seconds;
      for (const StepTimes& step : timed_) seconds.push_back(step.*phase);
      snapshot.step_times.*phase = median_of(std::move(seconds));
    }
  }
  return snapshot;
}

}  // namespace birkhoff
