// Verification of checkpoints by all ranks, before a run resumes from one: rank 0 looks for the
// newest valid checkpoint and names each candidate, and every rank reads its share of the files.
#pragma once

#include <string>

#include "cluster/base/collectives/process_group.h"
#include "runtime/checkpoint/checkpoint.h"

namespace birkhoff {

class SharedVerification {
 public:
  // The ranks must see the same files. `world` must outlive this object. Local.
  explicit SharedVerification(ProcessGroup& world) : world_(world) {}

  // For rank 0: verify_checkpoint(), with the same result and the same error, while the other ranks
  // help(). Collective over the world.
  std::string verify(const CheckpointFolder& checkpoint);
  // For rank 0: ends help() on the other ranks. Collective over the world.
  void finish();
  // For the other ranks: takes part in each verify() until rank 0 has called finish().
  void help();

 private:
  std::string verify_together(const CheckpointFolder& checkpoint);

  ProcessGroup& world_;
};

}  // namespace birkhoff
