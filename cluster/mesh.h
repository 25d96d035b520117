// Named axes over the world: rank = (data * sequence_size + sequence) * tensor_size + tensor, so
// neighbors on the tensor axis have adjacent ranks.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "cluster/base/collectives/process_group.h"
#include "cluster/world.h"

namespace birkhoff::configs {
class Mesh;
}

namespace birkhoff {

// The data-parallel ranks of `num_ranks` ranks. Error(kConfig) if a size is out of range, the
// product of the sizes is not `num_ranks`, or ranks_per_node does not divide the data axis.
std::int64_t check_axes(const configs::Mesh& mesh, std::int64_t num_ranks);

// Whether ZeRO's slices are those of a node's ranks (mesh.zero_inside_nodes).
bool has_node_slices(const configs::Mesh& mesh);

// Of the ranks of a data axis: those of this rank's node, in rank order, and those at its position
// in all nodes.
struct NodeGroups {
  ProcessGroup* inside;
  ProcessGroup* across;
};

class Mesh {
 public:
  // If mesh.data is 0, the data axis takes the ranks that remain after the other axes. The data
  // group reduces in two levels with mesh.ranks_per_node (two_levels.h), or as NCCL likes with
  // mesh.nccl_reductions. Errors as check_axes().
  // `device` holds the tensors of all groups; if it is a GPU (this rank's own, and the current
  // device), the groups use NCCL. Collective over the world. `world` must outlive the mesh.
  Mesh(World& world, const configs::Mesh& config, at::Device device);
  // The groups of this rank; size 1 where an axis is unused.
  ProcessGroup& data() { return data_.group(); }
  ProcessGroup& tensor() { return tensor_.group(); }
  ProcessGroup& sequence() { return sequence_.group(); }
  // With has_node_slices(): mesh.ranks_per_node ranks are a node. Else empty.
  std::optional<NodeGroups> nodes();
  // All groups that communicate, each once, the world first.
  std::vector<const ProcessGroup*> groups() const { return groups_; }
  // The same ranks as data() and tensor(), for host tensors.
  ProcessGroup& data_on_host() { return *data_.host; }
  ProcessGroup& tensor_on_host() { return *tensor_.host; }
  // The same ranks as nodes()->across; null without nodes().
  ProcessGroup* across_nodes_on_host() { return across_.host.get(); }

 private:
  struct Axis {
    std::unique_ptr<ProcessGroup> host, gpu;  // no gpu: its tensors are on the host
    ProcessGroup& group() { return gpu ? *gpu : *host; }
  };
  static Axis make_axis(World& world, const configs::Mesh& config, int axis_size, int color,
                        at::Device device, int node_ranks = 1);

  Axis data_, tensor_, sequence_;
  Axis inside_, across_;  // of nodes; without groups if there is no use for them
  std::vector<const ProcessGroup*> groups_;
};

}  // namespace birkhoff
