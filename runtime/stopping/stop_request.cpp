#include "runtime/stopping/stop_request.h"

namespace birkhoff {

bool StopRequest::asked() {
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

bool StopRequest::pressing() {
  return asked() && std::chrono::steady_clock::now() - *asked_at_ >= kPatience;
}

std::string StopRequest::why() const {
  if (signals_.received() != 0) return "a signal asked to stop";
  return by_time_limit() ? "the job's time limit is near" : "another rank asked to stop";
}

}  // namespace birkhoff
