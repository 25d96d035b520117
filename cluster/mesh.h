// Named axes over the world: rank = (data * sequence_size + sequence) * tensor_size + tensor, so
// neighbors on the tensor axis have adjacent ranks.
#pragma once

#include <memory>

#include "cluster/base/collectives/process_group.h"
#include "cluster/world.h"

namespace birkhoff::configs {
class Mesh;
}

namespace birkhoff {

// Error(kConfig) if mesh.ranks_per_node does not divide the data-parallel ranks.
void check_nodes(const configs::Mesh& mesh, std::int64_t data_ranks);

class Mesh {
 public:
  // If mesh.data is 0, the data axis takes the ranks that remain after the other axes. The data
  // group reduces in two levels with mesh.ranks_per_node (two_levels.h). Error(kConfig) if a size
  // is out of range, the product of the sizes is not the size of the world, or ranks_per_node does
  // not divide the data axis. `device` holds the tensors of all groups; if it is a GPU (this rank's
  // own, and the current device), the groups use NCCL. Collective over the world.
  Mesh(World& world, const configs::Mesh& config, at::Device device);
  // The groups of this rank; size 1 where an axis is unused.
  ProcessGroup& data() { return *data_; }
  ProcessGroup& tensor() { return *tensor_; }
  ProcessGroup& sequence() { return *sequence_; }

 private:
  std::unique_ptr<ProcessGroup> data_, tensor_, sequence_;
};

}  // namespace birkhoff
