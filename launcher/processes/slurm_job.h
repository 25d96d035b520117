// This process's Slurm job: its nodes, and the time at which it will end.
#pragma once

#include <atomic>
#include <cstddef>
#include <optional>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

namespace birkhoff {

// The job in whose batch script this process runs. Its nodes stay with it until it ends, so lost
// ranks can be restarted on the remaining nodes.
struct SlurmJob {
  std::string id;
  std::vector<std::string> nodes;
  // The name of the steps of this process's ranks. An allocation may have other steps: of other
  // runs, of a batch script, of a user who looks at a node.
  std::string step_name;

  // nullopt outside a Slurm job, and in its steps (srun) except an interactive salloc's.
  // Error(kUsage) if the job has ended, or if Slurm's commands do not work.
  static std::optional<SlurmJob> of_environment();

  // Kills the steps of this name. Returns the nodes that start a process, in the order of `nodes`.
  // Waits up to ten seconds for them, or two more once `wanted` nodes have responded.
  std::vector<std::string> end_steps(std::size_t wanted) const;
};

// The time at which Slurm will end this process's job. A thread asks Slurm every few minutes,
// because the time can be changed.
class TimeLimit {
 public:
  // Does nothing outside a Slurm job.
  TimeLimit();

  // Seconds since 1970; nullopt: not known yet, or there is no limit. Never waits.
  std::optional<double> end() const;

 private:
  void ask_again_and_again(const std::stop_token& stop, const std::string& job);

  std::atomic<double> seconds_{0};  // 0: not known
  std::jthread thread_;
};

// The placement of a job's ranks.
struct Placement {
  int ranks = 1;
  std::vector<std::string> nodes = {};  // of the Slurm job; empty: this machine, by mpirun
  std::string step_name = {};           // of the Slurm job's steps
};

// The policy by which ranks are placed on a Slurm job's nodes.
struct PlacementPolicy {
  int ranks = 1;        // wanted
  int min_ranks = 1;    // minimum to continue with after losing nodes
  int spare_nodes = 0;  // nodes that are left free at first
  int multiple_of = 1;  // the ranks that hold a replica of the model (mesh.tensor)
};

// The nodes that the ranks need.
std::size_t nodes_needed(const SlurmJob& job, const PlacementPolicy& policy);

// Places ranks on the job's `responding` nodes, with as many per node as if all of its nodes but
// the spares were used. nullopt if fewer than min_ranks fit, in whole replicas; then `why` receives
// a line.
std::optional<Placement> place(const SlurmJob& job, const PlacementPolicy& policy,
                               const std::vector<std::string>& responding, std::string& why);

}  // namespace birkhoff
