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
  return snapshot;
}

}  // namespace birkhoff
