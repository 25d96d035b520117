#include "cluster/mesh.h"

#include <algorithm>

#include "cluster/base/error.h"
#include "cluster/base/text/plural.h"
#include "configs/schema/config.pb.h"

#ifdef BIRKHOFF_CUDA
#include "cluster/nccl_group.h"
#endif

namespace birkhoff {

bool has_node_slices(const configs::Mesh& mesh) {
  return mesh.zero_inside_nodes() && mesh.ranks_per_node() > 1;
}

std::int64_t check_axes(const configs::Mesh& mesh, std::int64_t num_ranks) {
  if (mesh.tensor() < 1 || mesh.sequence() < 1 || mesh.data() < 0) {
    fail(ExitCode::kConfig,
         "mesh: data {}, tensor {}, sequence {}: tensor and sequence must be at least 1, data at "
         "least 0",
         mesh.data(), mesh.tensor(), mesh.sequence());
  }
  const std::int64_t others = std::int64_t{mesh.tensor()} * mesh.sequence();
  if (mesh.data() == 0 && (num_ranks % others != 0)) {
    fail(ExitCode::kConfig,
         "mesh: sequence {} x tensor {} does not divide the run's {}; start a multiple of {}",
         mesh.sequence(), mesh.tensor(), counted(num_ranks, "rank"), others);
  }
  const std::int64_t data = mesh.data() == 0 ? num_ranks / others : mesh.data();
  if (data * others != num_ranks) {
    fail(
        ExitCode::kConfig,
        "mesh: data {} x sequence {} x tensor {} is not the run's {}; start that many ranks, or set "
        "mesh.data=0 to use all that the other axes leave",
        mesh.data(), mesh.sequence(), mesh.tensor(), counted(num_ranks, "rank"));
  }
  if (mesh.ranks_per_node() != 0 && data % mesh.ranks_per_node() != 0) {
    fail(ExitCode::kConfig,
         "mesh.ranks_per_node: {} does not divide the {} data-parallel ranks; start a multiple of "
         "it, or set it to 0",
         mesh.ranks_per_node(), data);
  }
  return data;
}

// The groups of the ranks that share `color`. An axis of size 1 needs no communicator; every rank
// of the world takes the same branch.
Mesh::Axis Mesh::make_axis(World& world, const configs::Mesh& config, int axis_size, int color,
                           at::Device device, int node_ranks) {
  Axis axis;
  if (axis_size == 1) {
    axis.host = make_single_group();
    if (!device.is_cpu()) axis.gpu = make_single_group(device);
    return axis;
  }
  axis.host = world.split(color, world.rank(), node_ranks);
#ifdef BIRKHOFF_CUDA
  if (device.is_cuda()) {
    const SumOrder order = config.nccl_reductions() ? SumOrder::kNccl : SumOrder::kRanks;
    axis.gpu = std::make_unique<NcclGroup>(*axis.host, device,
                                           order == SumOrder::kNccl ? 1 : node_ranks, order);
  }
#else
  (void)config;
#endif
  return axis;
}

Mesh::Mesh(World& world, const configs::Mesh& config, at::Device device) {
  const int tensor_size = config.tensor(), sequence_size = config.sequence();
  const std::int64_t data_size = check_axes(config, world.size());
  const int tensor_index = world.rank() % tensor_size;
  const int sequence_index = world.rank() / tensor_size % sequence_size;
  const int data_index = world.rank() / (tensor_size * sequence_size);
  // The ranks of a group differ only in the index on its axis.
  data_ = make_axis(world, config, static_cast<int>(data_size),
                    sequence_index * tensor_size + tensor_index, device,
                    std::max(1, config.ranks_per_node()));
  sequence_ =
      make_axis(world, config, sequence_size, data_index * tensor_size + tensor_index, device);
  tensor_ =
      make_axis(world, config, tensor_size, data_index * sequence_size + sequence_index, device);
  if (has_node_slices(config)) {
    const int node_ranks = config.ranks_per_node();
    const int nodes = static_cast<int>(data_size) / node_ranks;
    const int others = sequence_index * tensor_size + tensor_index;
    inside_ =
        make_axis(world, config, node_ranks, others * nodes + data_index / node_ranks, device);
    across_ =
        make_axis(world, config, nodes, others * node_ranks + data_index % node_ranks, device);
  }
  groups_ = {&world.group()};
  for (const Axis* axis : {&tensor_, &sequence_, &data_, &inside_, &across_}) {
    for (const auto& group : {axis->host.get(), axis->gpu.get()}) {
      if (group != nullptr && group->size() > 1) groups_.push_back(group);
    }
  }
}

std::optional<NodeGroups> Mesh::nodes() {
  if (inside_.host == nullptr) return std::nullopt;
  return NodeGroups{&inside_.group(), &across_.group()};
}

}  // namespace birkhoff
