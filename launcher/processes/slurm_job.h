// The Slurm job in whose batch script this process runs. Its nodes stay with it until it ends, so
// ranks that were lost can be started again on those that are left.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

namespace birkhoff {

// The name of the job's steps that are not ranks': they wait for the loss of the node of the batch
// script, and stay while ranks are started again.
inline constexpr const char* kGuardStep = "birkhoff-guard";

struct SlurmJob {
  std::string id;
  std::vector<std::string> nodes;

  // nullopt outside a Slurm job, and in its steps (srun). Error(kUsage) if Slurm's commands do not
  // work.
  static std::optional<SlurmJob> of_environment();

  // Ends the steps of ranks at once, without asking them. Returns the nodes that start a process,
  // in the order of `nodes`. Waits ten seconds for that, or two after `wanted` nodes have.
  std::vector<std::string> end_steps(std::size_t wanted) const;
};

// Where the ranks of a job run.
struct Placement {
  int ranks = 1;
  std::vector<std::string> nodes = {};  // of the Slurm job; empty: this machine, by mpirun
};

// How ranks are spread over a Slurm job's nodes.
struct PlacementPolicy {
  int ranks = 1;        // wanted
  int least_ranks = 1;  // it goes on with so many if nodes are lost
  int spare_nodes = 0;  // nodes that are left free at first
};

// The nodes that the ranks need.
std::size_t nodes_needed(const SlurmJob& job, const PlacementPolicy& policy);

// Puts ranks on `responding` nodes of the job, as many on each as its nodes without the spare ones
// would get. nullopt if fewer than least_ranks fit; then `why` receives a line.
std::optional<Placement> place(const SlurmJob& job, const PlacementPolicy& policy,
                               const std::vector<std::string>& responding, std::string& why);

}  // namespace birkhoff
