// Named axes over the world: rank = (data * sequence_size + sequence) * tensor_size + tensor, so
// neighbours in the tensor axis are neighbours in rank.
#pragma once

#include <memory>

#include "cluster/base/collectives/group.h"
#include "cluster/world.h"

namespace birkhoff::configs {
class Mesh;
}

namespace birkhoff {

class Mesh {
 public:
  // mesh.data = 0 takes the ranks the other axes leave. Sizes that do not multiply to the world's:
  // Error(kConfig). `device`: where the tensors of all groups live; for a GPU, this rank's own and
  // the current one, groups are NCCL's. Collective over the world.
  Mesh(World& world, const configs::Mesh& config, at::Device device);
  ParallelGroups groups();
  Group& data() { return *data_; }

 private:
  std::unique_ptr<Group> data_, tensor_, sequence_;
};

}  // namespace birkhoff
