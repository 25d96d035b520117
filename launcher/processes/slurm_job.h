// The Slurm job in whose batch script this process runs. Its nodes stay with it until it ends, so
// ranks that were lost can be started again on those that are left.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

namespace birkhoff {

struct SlurmJob {
  std::string id;
  std::vector<std::string> nodes;
  // The name of the steps of this process's ranks. An allocation may have others: of other runs, of
  // a batch script, of a user who looks at a node.
  std::string step_name;

  // nullopt outside a Slurm job, and in its steps (srun) other than that of an interactive salloc.
  // Error(kUsage) if the job has ended, or if Slurm's commands do not work.
  static std::optional<SlurmJob> of_environment();

  // Ends the steps of this name at once, without asking them. Returns the nodes that start a
  // process, in the order of `nodes`. Waits ten seconds for that, or two after `wanted` nodes have.
  std::vector<std::string> end_steps(std::size_t wanted) const;
};

// Where the ranks of a job run.
struct Placement {
  int ranks = 1;
  std::vector<std::string> nodes = {};  // of the Slurm job; empty: this machine, by mpirun
  std::string step_name = {};           // of the Slurm job's steps
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
