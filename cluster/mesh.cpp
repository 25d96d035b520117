#include "cluster/mesh.h"

#include <algorithm>

#include "cluster/base/error.h"
#include "configs/schema/config.pb.h"

#ifdef BIRKHOFF_CUDA
#include "cluster/nccl_group.h"
#endif

namespace birkhoff {
namespace {

// The group of the ranks that share `color`. An axis of size 1 needs no communicator; every rank of
// the world takes the same branch.
std::unique_ptr<ProcessGroup> make_axis(World& world, int axis_size, int color, at::Device device,
                                        int node_ranks = 1) {
  if (axis_size == 1) return make_single_group(device);
  std::unique_ptr<ProcessGroup> group = world.split(color, world.rank(), node_ranks);
#ifdef BIRKHOFF_CUDA
  if (device.is_cuda()) return std::make_unique<NcclGroup>(*group, device, node_ranks);
#endif
  return group;
}

}  // namespace

void check_nodes(const configs::Mesh& mesh, std::int64_t data_ranks) {
  if (mesh.ranks_per_node() == 0 || data_ranks % mesh.ranks_per_node() == 0) return;
  fail(ExitCode::kConfig,
       "mesh.ranks_per_node: {} does not divide the {} data-parallel ranks; start a multiple of "
       "it, or set it to 0",
       mesh.ranks_per_node(), data_ranks);
}

Mesh::Mesh(World& world, const configs::Mesh& config, at::Device device) {
  const int tensor_size = config.tensor(), sequence_size = config.sequence();
  if (tensor_size < 1 || sequence_size < 1 || config.data() < 0) {
    fail(ExitCode::kConfig,
         "mesh: data {}, tensor {}, sequence {}: tensor and sequence must be at least 1, data at "
         "least 0",
         config.data(), tensor_size, sequence_size);
  }
  const std::int64_t others = std::int64_t{tensor_size} * sequence_size;
  const std::int64_t data_size = config.data() == 0 ? world.size() / others : config.data();
  if (data_size * others != world.size()) {
    fail(ExitCode::kConfig,
         "mesh: data {} x sequence {} x tensor {} does not equal the {} ranks of this run; start "
         "a different number of ranks or set mesh.data to 0 (all ranks that the other axes leave)",
         config.data(), sequence_size, tensor_size, world.size());
  }
  check_nodes(config, data_size);
  const int tensor_index = world.rank() % tensor_size;
  const int sequence_index = world.rank() / tensor_size % sequence_size;
  const int data_index = world.rank() / (tensor_size * sequence_size);
  // The ranks of a group differ only in the index on its axis.
  data_ = make_axis(world, static_cast<int>(data_size), sequence_index * tensor_size + tensor_index,
                    device, std::max(1, config.ranks_per_node()));
  sequence_ = make_axis(world, sequence_size, data_index * tensor_size + tensor_index, device);
  tensor_ = make_axis(world, tensor_size, data_index * sequence_size + sequence_index, device);
}

}  // namespace birkhoff
