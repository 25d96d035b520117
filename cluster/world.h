// The processes of a run: MPI's world as a ProcessGroup, and each rank's machine and cores.
#pragma once

#include <exception>
#include <memory>
#include <string>

#include "cluster/base/collectives/process_group.h"

namespace birkhoff {

// Initializes MPI on construction and finalizes it on destruction; at most one per process. In a
// program started without mpirun or srun the world has one rank.
class World {
 public:
  // Calls MPI_Init_thread(MPI_THREAD_MULTIPLE). Error(kUsage) if MPI sees 1 rank while the
  // environment announces more (srun without PMIx) or names a step that has ended, or if the MPI
  // library provides less thread support. Collective over all processes.
  World();
  // Calls MPI_Finalize, which waits for all ranks, but not during exception unwinding: the other
  // ranks may never get there, and mpirun ends them when this process exits without finalizing.
  // After a failure that was caught while the World exists, call abort().
  ~World();

  ProcessGroup& group() { return *group_; }
  int rank() const { return group_->rank(); }
  int size() const { return group_->size(); }
  int local_rank() const { return local_rank_; }  // among the ranks of this machine
  int local_size() const { return local_size_; }
  // The number of cores on which this rank should compute (share_of_cores in cpu.h).
  int cores() const { return cores_; }
  // The machine's name: the node's in a Slurm job, else MPI's.
  const std::string& host() const { return host_; }

  // A group of the ranks with equal `color`, ordered by `key`; node_ranks as in MpiGroup.
  // Collective over the world.
  std::unique_ptr<ProcessGroup> split(int color, int key, int node_ranks = 1);

  // Ends every rank of the world with this exit code (MPI_Abort). Local.
  [[noreturn]] void abort(int exit_code);

 private:
  void find_machine();

  std::unique_ptr<ProcessGroup> group_;
  int local_rank_ = 0, local_size_ = 1, cores_ = 1;
  std::string host_;
  const int exceptions_at_start_ = std::uncaught_exceptions();
};

// Name and version of the MPI library that this process uses. Local.
std::string mpi_library();
// Number of ranks that the environment announces (Open MPI, PMI, Slurm) before MPI starts; 1 if
// none.
int announced_ranks();
// Rank that the environment announces; 0 if none.
int announced_rank();
// Error(kUsage) if several ranks were announced but MPI sees one: each would train a run of its
// own, and all would write the same files.
void check_world_size(int mpi_size, int announced);

}  // namespace birkhoff
