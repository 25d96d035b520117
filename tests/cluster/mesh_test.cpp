#include "cluster/mesh.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cluster/base/error.h"
#include "cluster/mpi_group.h"
#include "configs/schema/config.pb.h"
#include "tests/cluster/mpi_test_main.h"

namespace birkhoff {
namespace {

configs::Mesh config(int data, int sequence, int tensor) {
  configs::Mesh mesh;
  mesh.set_data(data);
  mesh.set_sequence(sequence);
  mesh.set_tensor(tensor);
  return mesh;
}

TEST(Mesh, DefaultPutsAllRanksOnTheDataAxis) {
  World& world = test_world();
  Mesh mesh(world, configs::Mesh(), at::kCPU);
  EXPECT_EQ(mesh.data().size(), world.size());
  EXPECT_EQ(mesh.data().rank(), world.rank());
  EXPECT_EQ(mesh.tensor().size(), 1);
  EXPECT_EQ(mesh.sequence().size(), 1);
}

// Every way to split this world into three axes.
TEST(Mesh, RanksAreNumberedDataThenSequenceThenTensor) {
  World& world = test_world();
  const int size = world.size(), rank = world.rank();
  const auto expect_members = [&](ProcessGroup& group, int first, int stride) {
    const at::Tensor ranks = at::empty({group.size()}, at::kLong);
    group.all_gather(ranks, at::full({1}, rank, at::kLong), "members");
    EXPECT_TRUE(at::equal(ranks, at::arange(group.size(), at::kLong) * stride + first));
    EXPECT_EQ(first + stride * group.rank(), rank);
  };
  for (int tensor = 1; tensor <= size; ++tensor) {
    for (int sequence = 1; tensor * sequence <= size; ++sequence) {
      if (size % (tensor * sequence) != 0) continue;
      SCOPED_TRACE(fmt::format("tensor {} sequence {}", tensor, sequence));
      const int inner = tensor * sequence;
      Mesh mesh(world, config(0, sequence, tensor), at::kCPU);
      EXPECT_EQ(mesh.tensor().size(), tensor);
      EXPECT_EQ(mesh.sequence().size(), sequence);
      EXPECT_EQ(mesh.data().size(), size / inner);
      expect_members(mesh.tensor(), rank - rank % tensor, 1);
      expect_members(mesh.sequence(), rank - rank % inner + rank % tensor, tensor);
      expect_members(mesh.data(), rank % inner, inner);
    }
  }
}

TEST(Mesh, TheDataGroupReducesInNodes) {
  World& world = test_world();
  if (world.size() == 1) return;  // a single rank has no group
  configs::Mesh nodes;
  nodes.set_ranks_per_node(2);
  Mesh mesh(world, nodes, at::kCPU);
  mesh.data().all_reduce(at::ones({24000}), ReduceOp::kSum, "test");
  // Of its half of the tensor, a rank sends what other nodes own and what it owns to these.
  EXPECT_EQ(dynamic_cast<MpiGroup&>(mesh.data()).bytes_between_nodes(),
            2 * 24000 * 4 / 2 * (world.size() / 2 - 1) / (world.size() / 2));
}

TEST(Mesh, SizesThatDoNotFitAreConfigErrors) {
  World& world = test_world();
  const auto expect_refused = [&](const configs::Mesh& sizes, const std::string& why) {
    try {
      Mesh mesh(world, sizes, at::kCPU);
      ADD_FAILURE() << "accepted: " << sizes.ShortDebugString();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kConfig);
      EXPECT_THAT(error.what(), testing::HasSubstr(why));
    }
  };
  const std::string ranks = fmt::format("the run's {} rank", world.size());
  expect_refused(config(world.size() + 1, 1, 1), ranks);
  expect_refused(config(0, world.size() + 1, 1), ranks);
  expect_refused(config(0, 1, 5), ranks);
  expect_refused(config(world.size(), 1, 2), ranks);
  expect_refused(config(0, 1 << 30, 1 << 30), ranks);
  expect_refused(config(0, 0, 1), "at least 1");
  expect_refused(config(0, 1, -1), "at least 1");
  expect_refused(config(-1, 1, 1), "at least");
  configs::Mesh nodes;
  nodes.set_ranks_per_node(world.size() + 1);
  expect_refused(nodes, "mesh.ranks_per_node: ");
}

}  // namespace
}  // namespace birkhoff
