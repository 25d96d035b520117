#include "launcher/processes/time_limit.h"

#include <chrono>

#include "cluster/base/error.h"
#include "cluster/base/slurm_environment.h"
#include "configs/loader/site_io.h"
#include "launcher/processes/command_output.h"

namespace birkhoff {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr std::chrono::seconds kAnswerLimit{10};
constexpr std::chrono::minutes kAskEvery{3};

// The end of the job, in seconds since 1970. It is computed from the remaining time, which depends
// on no time zone.
std::optional<double> end_of_job(const std::string& job) {
  const CommandOutput left = output_of(squeue({"--jobs=" + job, "--format=%L"}), kAnswerLimit);
  if (left.code != 0) return std::nullopt;
  const auto time = slurm_time(left.out.substr(0, left.out.find('\n')));  // not of "UNLIMITED"
  const Seconds now = std::chrono::system_clock::now().time_since_epoch();
  return time ? std::optional((now + *time).count()) : std::nullopt;
}

}  // namespace

TimeLimit::TimeLimit() {
  if (const auto job = slurm_job_id())
    thread_ = std::thread([this, job = *job] { ask_again_and_again(job); });
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
      // If Slurm does not answer, its last answer stands.
      if (const std::optional<double> end = end_of_job(job)) seconds_ = *end;
    } catch (const Error&) {
      // No process can be started now; perhaps later.
    }
    lock.lock();
    wakes_.wait_for(lock, kAskEvery, [this] { return stop_; });
  }
}

}  // namespace birkhoff
