// The memory that one rank of a run holds between steps, the bytes that it sends in a step, and the
// bytes that it writes into a checkpoint. Computed with the run's own objects on LibTorch's meta
// device, which has sizes and no memory, and with groups that count. Local.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "configs/schema/config.pb.h"
#include "runtime/checkpoint/layout.h"

namespace birkhoff {

// Bytes of the memory of tensors, which may share some.
std::int64_t memory_bytes(const std::vector<at::Tensor>& tensors);

// Collective operations of a step with one purpose.
struct Exchange {
  std::string what;  // "gradients", "values", ...
  std::int64_t operations = 0;
  std::int64_t bytes = 0;  // of this rank's inputs, as OperationRing counts them
  double sent_bytes = 0;   // to other ranks
  // Of these, the bytes to the next rank of a ring (NCCL's gathers), and in two levels
  // (mesh.ranks_per_node) those inside a node and those between nodes. The rest goes to all ranks
  // equally.
  double ring_bytes = 0, inside_node_bytes = 0, between_nodes_bytes = 0;
  bool in_backward_pass = false;  // may run while the backward pass continues
};

struct RankState {
  std::int64_t values_bytes = 0;  // parameters in their buckets, and statistics
  std::int64_t gradients_bytes = 0;
  // What ZeRO stages 2 and 3 add during a pass: gathered values and gradients of some buckets.
  std::int64_t passing_bytes = 0;
  std::int64_t optimizer_bytes = 0;
  // The buffer of a CPU run's group that receives the other ranks' slices of the longest bucket.
  std::int64_t exchange_bytes = 0;
  std::vector<Exchange> exchanges;  // rank 0's, in a step
};
// Error(kConfig) as make_model().
RankState rank_state(const configs::Config& config, std::int64_t vocabulary, int num_ranks);

struct SavedState {
  CheckpointSize size;
  std::int64_t copy_bytes = 0;  // of the rank that copies most
};
SavedState saved_state(const configs::Config& config, std::int64_t vocabulary, int num_ranks);

}  // namespace birkhoff
