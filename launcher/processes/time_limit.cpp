#include "launcher/processes/time_limit.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "cluster/base/error.h"
#include "launcher/processes/command_output.h"

namespace birkhoff {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr std::chrono::seconds kAnswerLimit{10};
constexpr std::chrono::minutes kAskEvery{3};

// When the job ends, in seconds since 1970. The time that is left depends on no time zone.
std::optional<double> end_of_job(const std::string& job) {
  const CommandOutput left =
      output_of({"squeue", "--noheader", "--jobs=" + job, "--format=%L"}, kAnswerLimit);
  const std::optional<double> seconds =
      left.code == 0 ? seconds_of_slurm_time(left.out) : std::nullopt;
  const Seconds now = std::chrono::system_clock::now().time_since_epoch();
  return seconds ? std::optional(now.count() + *seconds) : std::nullopt;
}

}  // namespace

TimeLimit::TimeLimit() {
  const char* job = std::getenv("SLURM_JOB_ID");
  if (job != nullptr)
    thread_ = std::thread([this, job = std::string(job)] { ask_again_and_again(job); });
}

TimeLimit::~TimeLimit() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wakes_.notify_one();
  if (thread_.joinable()) thread_.join();
}

std::optional<double> TimeLimit::end() const {
  const double seconds = seconds_;
  return seconds > 0 ? std::optional(seconds) : std::nullopt;
}

void TimeLimit::ask_again_and_again(const std::string& job) {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    lock.unlock();
    try {
      // If Slurm does not answer, what it said before stands.
      if (const std::optional<double> end = end_of_job(job)) seconds_ = *end;
    } catch (const Error&) {
      // No process can be started now; perhaps later.
    }
    lock.lock();
    wakes_.wait_for(lock, kAskEvery, [this] { return stop_; });
  }
}

std::optional<double> seconds_of_slurm_time(const std::string& text) {
  int days = 0, hours = 0, minutes = 0, seconds = 0;
  const char* line = text.c_str();
  if (std::sscanf(line, "%d-%d:%d:%d", &days, &hours, &minutes, &seconds) != 4) {
    days = 0;
    if (std::sscanf(line, "%d:%d:%d", &hours, &minutes, &seconds) != 3) {
      hours = 0;
      if (std::sscanf(line, "%d:%d", &minutes, &seconds) != 2) return std::nullopt;
    }
  }
  return ((days * 24.0 + hours) * 60 + minutes) * 60 + seconds;
}

}  // namespace birkhoff
