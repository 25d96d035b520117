// NcclGroup on one or more ranks, which may share a GPU: a test of function, not of speed.
#include "cluster/nccl_group.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "cluster/base/error.h"
#include "cluster/base/gpu/device.h"
#include "tests/cluster/group_conformance.h"
#include "tests/cluster/mpi_test_main.h"

namespace birkhoff {
namespace {

at::Device test_device() {
  ::setenv("BIRKHOFF_SHARE_GPUS", "1", /*overwrite=*/1);
  return cuda_device(test_world().local_rank());
}

TEST(NcclGroup, SmallConforms) {
  NcclGroup group(test_world().group(), test_device());
  EXPECT_EQ(group.rank(), test_world().rank());
  EXPECT_EQ(group.size(), test_world().size());
  check_operations(group);
  check_bytes(group);
  check_overlap(group);
  check_ring(group);
  check_misuse(group);
}

// Tensors too large for the small path, with equal and unequal slices. The bits are MpiGroup's.
TEST(NcclGroup, LargeSumsHaveTheBitsOfMpi) {
  NcclGroup group(test_world().group(), test_device());
  for (const std::int64_t count : {std::int64_t{3000001}, std::int64_t{3000000}}) {
    const at::Tensor mine =
        at::sin(at::arange(count, at::kDouble) * 0.7 + group.rank()).to(at::kFloat);
    const at::Tensor by_mpi = mine.clone(), by_nccl = mine.to(group.device());
    test_world().group().all_reduce(by_mpi, ReduceOp::kSum, "mpi");
    group.all_reduce(by_nccl, ReduceOp::kSum, "nccl");
    EXPECT_TRUE(at::equal(by_mpi, by_nccl.cpu()));
  }
}

// NCCL's own reductions, of each type and operation: equal to ours up to the rounding of the type,
// and the same bits on all ranks.
TEST(NcclGroup, ReductionsByNcclAgreeWithOurs) {
  NcclGroup ours(test_world().group(), test_device());
  NcclGroup theirs(test_world().group(), test_device(), 1, SumOrder::kNccl);
  for (const auto& [dtype, bound] : {std::pair(at::kFloat, 1e-6), std::pair(at::kDouble, 1e-15),
                                     std::pair(at::kBFloat16, 0.02), std::pair(at::kLong, 0.0)}) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin}) {
      const std::int64_t count = 1000 * ours.size();
      const at::Tensor mine =
          (at::sin(at::arange(count, at::kDouble) * 0.7 + ours.rank()) * 100).to(dtype);
      const at::Tensor a = mine.to(ours.device()), b = a.clone();
      const at::Tensor slice_a = at::empty({1000}, a.options()), slice_b = at::empty_like(slice_a);
      ours.reduce_scatter(slice_a, a, op, "slice");
      theirs.reduce_scatter(slice_b, b, op, "slice");
      ours.all_reduce(a, op, "whole");
      theirs.all_reduce(b, op, "whole");
      const auto error = [&](const at::Tensor& x, const at::Tensor& y) {
        return (x.cpu().to(at::kDouble) - y.cpu().to(at::kDouble)).abs().max().item<double>();
      };
      EXPECT_LE(error(a, b), 100 * ours.size() * bound);
      EXPECT_LE(error(slice_a, slice_b), 100 * ours.size() * bound);
      const at::Tensor of_all = at::empty({count * ours.size()}, b.options());
      theirs.all_gather(of_all, b, "all ranks");
      for (int rank = 0; rank < ours.size(); ++rank) {
        EXPECT_TRUE(at::equal(of_all.narrow(0, rank * count, count), b));
      }
    }
  }
}

// Work queued on the caller's stream before an operation runs before it, and work queued after
// wait() runs after it. The host does not wait in between.
TEST(NcclGroup, LargeOperationsStayInTheStreamsOrder) {
  NcclGroup group(test_world().group(), test_device());
  const auto options = at::TensorOptions().dtype(at::kFloat).device(group.device());
  at::Tensor x = at::zeros({10000000}, options);
  for (int step = 0; step < 20; ++step) {
    x.add_(1);
    const auto work = group.all_reduce_async(x, ReduceOp::kMax, "step");
    work->wait();
    x.mul_(2);
  }
  double expected = 0;
  for (int step = 0; step < 20; ++step) expected = 2 * (expected + 1);
  EXPECT_EQ(x.min().item<double>(), expected);
  EXPECT_EQ(x.max().item<double>(), expected);
}

TEST(NcclGroup, SmallAnAbortedGroupSaysWhy) {
  NcclGroup group(test_world().group(), test_device());
  group.barrier("together");
  // Not the group's own barrier: abort() may cut off data that it still owes to the other ranks.
  test_world().group().barrier("all are through");
  group.abort("the test wants it");
  const at::Tensor x = at::ones({5}, at::TensorOptions().device(group.device()));
  try {
    group.all_reduce(x, ReduceOp::kSum, "too late");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kPeer);
    EXPECT_THAT(error.what(), testing::HasSubstr("the test wants it"));
  }
  test_world().group().barrier("all have aborted");
}

TEST(NcclGroup, SmallHostTensorsAreRefused) {
  NcclGroup group(test_world().group(), test_device());
  EXPECT_THROW(group.all_reduce(at::ones({5}), ReduceOp::kSum, "host"), Error);
}

}  // namespace
}  // namespace birkhoff
