#include "runtime/reporting/step_clock.h"

#include "cluster/base/collectives/process_group.h"

namespace birkhoff {
namespace {

double seconds_between(std::chrono::steady_clock::time_point a,
                       std::chrono::steady_clock::time_point b) {
  return std::chrono::duration<double>(b - a).count();
}

}  // namespace

void StepClock::begin() { begin_ = Clock::now(); }

void StepClock::has_batch() {
  times_.data = seconds_between(begin_, Clock::now());
  waited_ = waited_seconds();
  passes_.start();
}

void StepClock::passes_launched() {
  passes_.stop();
  launched_ = Clock::now();
  const double waited = waited_seconds();
  times_.passes = waited_ - waited;  // to which end() adds the time of the passes
  waited_ = waited;
}

void StepClock::end() {
  times_.passes += passes_.seconds();
  const Clock::time_point now = Clock::now();
  times_.update = is_gpu_ ? 0 : seconds_between(launched_, now) - (waited_seconds() - waited_);
  seconds_ = seconds_between(begin_, now);
}

}  // namespace birkhoff
