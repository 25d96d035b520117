#include <fmt/format.h>

#include <chrono>
#include <ostream>
#include <set>
#include <thread>

#include "cluster/base/error.h"
#include "launcher/commands.h"
#include "launcher/processes/command_output.h"
#include "launcher/slurm/run_jobs.h"

namespace birkhoff {
namespace {

constexpr std::chrono::seconds kScancelLimit{30}, kCancelLook{1}, kMaxWait{300};

void scancel(const std::vector<std::string>& options, const std::string& job) {
  std::vector<std::string> line = {"scancel"};
  line.insert(line.end(), options.begin(), options.end());
  line.push_back(job);
  const CommandOutput output = output_of(line, kScancelLimit);
  if (output.code == 0) return;
  fail(ExitCode::kUsage, "scancel {}: {}", job,
       output.err.empty() ? fmt::format("ended with {}", output.code) : output.err);
}

}  // namespace

int cancel_command(const std::string& run, std::ostream& out, std::ostream& err) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point deadline = Clock::now() + kMaxWait;
  std::set<std::string> asked, removed;
  for (;;) {
    const RunJobs jobs = jobs_of(run);
    if (!jobs.squeue_answers) {
      fail(ExitCode::kUsage, "{}: squeue does not answer, so its jobs are not known: try again",
           run);
    }
    if (jobs.queued.empty()) break;
    // Pending jobs are canceled first: the next one must not start when the running one ends.
    for (const QueuedJob& job : jobs.queued) {
      if (job.is_active() || !removed.insert(job.id).second) continue;
      scancel({}, job.id);
      out << "job " << job.id << ": removed from the queue" << std::endl;
    }
    for (const QueuedJob& job : jobs.queued) {
      if (job.state != "RUNNING" || !asked.insert(job.id).second) continue;
      scancel({"--batch", "--signal=USR2"}, job.id);  // its script saves, and does not requeue
      out << "job " << job.id << ": asked to save and end" << std::endl;
    }
    if (Clock::now() > deadline) {
      err << fmt::format("birkhoff: {}: job {} is still in the queue ({}): `scancel {}` ends it\n",
                         run, jobs.queued[0].id, jobs.queued[0].state, jobs.queued[0].id);
      return static_cast<int>(ExitCode::kHang);
    }
    std::this_thread::sleep_for(kCancelLook);
  }
  for (const std::string& job : asked) out << "job " << job << ": ended\n";
  if (asked.empty() && removed.empty()) out << run << ": has no job in the queue\n";
  return 0;
}

}  // namespace birkhoff
