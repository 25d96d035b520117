// The processes of a run: MPI's world as a Group, and what each rank must know of its machine.
#pragma once

#include <memory>
#include <string>

#include "cluster/base/collectives/group.h"

namespace birkhoff {

// MPI from construction to destruction; at most one in a process. Started without mpirun or srun it
// is a world of one.
class World {
 public:
  // MPI_Init_thread(MULTIPLE). Error(kUsage) if MPI says 1 rank while SLURM_STEP_NUM_TASKS says
  // more (srun without PMIx), or the MPI library gives less thread support. Collective over all
  // processes.
  World();
  // MPI_Finalize, which waits for all ranks. Not while an exception unwinds: the others may never
  // come, and mpirun ends them when this process exits without finalizing. After a failure that was
  // caught inside, call abort().
  ~World();

  Group& group();
  int rank() const;
  int size() const;
  int local_rank() const;  // among the ranks of this machine
  int local_size() const;
  const std::string& host() const;

  // A group of the ranks with equal `color`, ordered by `key`. Collective over the world.
  std::unique_ptr<Group> split(int color, int key);

  // Ends every rank of the world with this exit code (MPI_Abort). Local.
  [[noreturn]] void abort(int exit_code);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// Number of ranks the environment announces (Open MPI, PMI, Slurm) before MPI is started; 1 if
// none.
int announced_ranks();
// Rank the environment announces; 0 if none.
int announced_rank();
// Error(kUsage) if several ranks were announced but MPI sees one: each would train alone and
// overwrite the others' files.
void check_world_size(int mpi_size, int announced);

}  // namespace birkhoff
