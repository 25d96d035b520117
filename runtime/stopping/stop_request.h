// A request of this process to save and stop the run: because a signal came, or because the
// scheduler will soon end the job. Ranks must agree before they act.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>

#include "runtime/stopping/signals.h"

namespace birkhoff {

class StopRequest {
 public:
  // job_end: seconds since 1970 at which the job will be ended, as far as known. It is called often
  // and must not wait. Empty: the job has no end. `signals` must outlive this object.
  explicit StopRequest(const StopSignals& signals,
                       std::function<std::optional<double>()> job_end = {})
      : signals_(signals), job_end_(std::move(job_end)) {}

  // Maximum seconds that stopping takes: the current step, and a save.
  void set_needed_seconds(double seconds) { needed_seconds_ = seconds; }

  bool asked() {
    if (asked_at_) return true;
    bool asks = signals_.received() != 0;
    if (!asks && job_end_) {
      const std::optional<double> end = job_end_();
      const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
      asks = end && now.count() + needed_seconds_ >= *end;
    }
    if (asks) asked_at_ = std::chrono::steady_clock::now();
    return asks;
  }
  // Requested at least two seconds ago: long operations should be abandoned.
  bool pressing() { return asked() && std::chrono::steady_clock::now() - *asked_at_ >= kPatience; }
  // Requested because the job will end, and no signal came.
  bool by_time_limit() const { return asked_at_.has_value() && signals_.received() == 0; }
  // The source of the request, for a message.
  std::string why() const {
    if (signals_.received() != 0) return "a signal asked to stop";
    return by_time_limit() ? "the job's time limit is near" : "another rank asked to stop";
  }

 private:
  static constexpr std::chrono::seconds kPatience{2};

  const StopSignals& signals_;
  const std::function<std::optional<double>()> job_end_;
  double needed_seconds_ = 10;  // until a step is measured
  std::optional<std::chrono::steady_clock::time_point> asked_at_;
};

}  // namespace birkhoff
