// The time at which Slurm will end this process's job.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

namespace birkhoff {

// A thread asks Slurm every few minutes, because the time can be changed.
class TimeLimit {
 public:
  // Does nothing outside a Slurm job.
  TimeLimit();
  ~TimeLimit();
  TimeLimit(const TimeLimit&) = delete;
  TimeLimit& operator=(const TimeLimit&) = delete;

  // Seconds since 1970; nullopt: not known yet, or there is no limit. Never waits.
  std::optional<double> end() const;

 private:
  void ask_again_and_again(const std::string& job);

  std::atomic<double> seconds_{0};  // 0: not known
  std::mutex mutex_;
  std::condition_variable wakes_;
  bool stop_ = false;  // guarded by mutex_
  std::thread thread_;
};

}  // namespace birkhoff
