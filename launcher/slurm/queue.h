// Slurm's queue, read with Slurm's commands.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace birkhoff {

struct QueuedJob {
  std::string id;         // "17", or "17_3" for an element of an array
  std::string state;      // Slurm's word: PENDING, RUNNING, COMPLETING, ...
  std::string time_left;  // of its limit, as Slurm writes it
  std::string nodes;      // a list in Slurm's words; empty while it waits
  std::string reason;     // why it waits

  // Whether it has nodes, which its processes may still be using.
  bool is_active() const { return state != "PENDING"; }
};

// This user's pending and running jobs. nullopt if squeue does not answer.
std::optional<std::vector<QueuedJob>> queued_jobs();

// The jobs with one of these ids, in the order of the queue.
std::vector<QueuedJob> jobs_with(const std::vector<QueuedJob>& queue,
                                 const std::vector<std::string>& ids);

}  // namespace birkhoff
