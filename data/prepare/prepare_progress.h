// Progress reports of prepare: it times the phases and calls the user's function at intervals.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

#include "data/prepare/prepare.h"

namespace birkhoff {

class ProgressReports {
 public:
  ProgressReports(const std::function<void(const PrepareProgress&)>& callback, int num_passes)
      : callback_(callback), num_passes_(num_passes) {}

  void begin(const std::string& phase, std::int64_t total_bytes) {
    now_.phase = phase;
    now_.done_bytes = 0;
    now_.total_bytes = total_bytes;
    phase_start_ = Clock::now();
  }
  void add(std::int64_t bytes) {
    now_.done_bytes += bytes;
    if (Clock::now() - last_ >= std::chrono::milliseconds(100)) report();
  }
  // These bytes of the phase need not be read.
  void skip(std::int64_t bytes) { now_.total_bytes -= bytes; }
  // pass: the phase was a pass over the input, as opposed to spooling.
  void end(bool pass) {
    report();
    if (pass) ++passes_done_;
  }

 private:
  using Clock = std::chrono::steady_clock;

  void report() {
    if (!callback_) return;
    last_ = Clock::now();
    now_.elapsed_seconds = std::chrono::duration<double>(last_ - start_).count();
    const double seconds = std::chrono::duration<double>(last_ - phase_start_).count();
    now_.bytes_per_second = seconds > 0 ? static_cast<double>(now_.done_bytes) / seconds : 0;
    now_.eta_seconds = -1;
    if (now_.total_bytes > 0 && now_.done_bytes > 0) {
      const double done =
          static_cast<double>(now_.done_bytes) / static_cast<double>(now_.total_bytes);
      const double left = std::max(0.0, num_passes_ - passes_done_ - done);
      now_.eta_seconds = seconds * left / done;
    }
    callback_(now_);
  }

  const std::function<void(const PrepareProgress&)>& callback_;
  int num_passes_, passes_done_ = 0;
  Clock::time_point start_ = Clock::now(), phase_start_ = start_, last_ = start_;
  PrepareProgress now_;
};

}  // namespace birkhoff
