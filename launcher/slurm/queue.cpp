#include "launcher/slurm/queue.h"

#include <algorithm>
#include <chrono>
#include <sstream>

#include "launcher/processes/command_output.h"

namespace birkhoff {
namespace {

constexpr std::chrono::seconds kSqueueLimit{30};

}  // namespace

std::optional<std::vector<QueuedJob>> queued_jobs() {
  // %i id, %T state, %L time left, %N nodes, %r reason; an element of an array in a line of its
  // own.
  const CommandOutput output =
      output_of(squeue({"--me", "--array", "--format=%i|%T|%L|%N|%r"}), kSqueueLimit);
  if (output.code != 0) return std::nullopt;
  std::vector<QueuedJob> jobs;
  std::istringstream lines(output.out);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream fields(line);
    QueuedJob job;
    for (std::string* field : {&job.id, &job.state, &job.time_left, &job.nodes}) {
      std::getline(fields, *field, '|');
    }
    if (std::getline(fields, job.reason)) jobs.push_back(job);
  }
  return jobs;
}

std::vector<QueuedJob> jobs_with(const std::vector<QueuedJob>& queue,
                                 const std::vector<std::string>& ids) {
  std::vector<QueuedJob> found;
  std::copy_if(queue.begin(), queue.end(), std::back_inserter(found), [&](const QueuedJob& job) {
    return std::find(ids.begin(), ids.end(), job.id) != ids.end();
  });
  return found;
}

}  // namespace birkhoff
