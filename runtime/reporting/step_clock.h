// The clock of a training step: its duration, and this rank's own time by phase.
#pragma once

#include <c10/core/Device.h>

#include <chrono>

#include "cluster/base/activity.h"
#include "cluster/base/gpu/device_timer.h"

namespace birkhoff {

// Call begin(), has_batch(), passes_launched() and end() in this order, on the thread that trains.
class StepClock {
 public:
  explicit StepClock(at::Device device) : is_gpu_(device.is_cuda()), passes_(device) {}

  void begin();
  void has_batch();
  // All passes are launched, and this rank has not yet waited for other ranks.
  void passes_launched();
  // Blocks until the passes are done. On a GPU the update, which ends later, counts as 0.
  void end();

  double step_ms() const { return 1000 * seconds_; }
  // Without the time in which this rank waited for other ranks (process_group.h).
  const StepTimes& times() const { return times_; }

 private:
  using Clock = std::chrono::steady_clock;

  const bool is_gpu_;
  DeviceTimer passes_;
  Clock::time_point begin_, launched_;
  double waited_ = 0;  // when the running part began
  double seconds_ = 0;
  StepTimes times_;
};

}  // namespace birkhoff
