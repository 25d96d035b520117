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

class Mesh {
 public:
  // If mesh.data is 0, the data axis takes the ranks that remain after the other axes.
  // Error(kConfig) if a size is out of range or the product of the sizes is not the size of the
  // world. `device` holds the tensors of all groups; if it is a GPU (this rank's own, and the
  // current device), the groups use NCCL. Collective over the world.
  Mesh(World& world, const configs::Mesh& config, at::Device device);
  // The groups of this rank; size 1 where an axis is unused.
  ProcessGroup& data() { return *data_; }
  ProcessGroup& tensor() { return *tensor_; }
  ProcessGroup& sequence() { return *sequence_; }

 private:
  std::unique_ptr<ProcessGroup> data_, tensor_, sequence_;
};

}  // namespace birkhoff
