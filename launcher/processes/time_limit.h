// When Slurm will end the job that this process belongs to.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

namespace birkhoff {

// A thread asks Slurm, and asks again every few minutes, because the time can be changed.
class TimeLimit {
 public:
  // Asks nobody if the process is in no Slurm job.
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

// Seconds of a time as Slurm prints it: "[[days-]hours:]minutes:seconds". nullopt: another text,
// such as UNLIMITED.
std::optional<double> seconds_of_slurm_time(const std::string& text);

}  // namespace birkhoff
