#include "tests/cluster/base/thread_group.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>

#include "cluster/base/error.h"
#include "tests/cluster/group_conformance.h"

namespace birkhoff {
namespace {

TEST(SingleGroup, Conforms) {
  const std::unique_ptr<ProcessGroup> group = make_single_group();
  EXPECT_EQ(group->size(), 1);
  check_operations(*group);
  check_bytes(*group);
  check_overlap(*group);
  check_ring(*group);
  check_misuse(*group);
}

TEST(ThreadGroup, Conforms) {
  for (const int size : {2, 3}) {
    run_ranks(size, [](ProcessGroup& group) {
      check_operations(group);
      check_bytes(group);
      check_overlap(group);
      check_ring(group);
      check_misuse(group);
    });
  }
}

TEST(ThreadGroup, AFailingRankEndsTheOthersAndIsReported) {
  std::atomic<int> num_told = 0;
  try {
    run_ranks(4, [&](ProcessGroup& group) {
      group.barrier("start");
      if (group.rank() == 2) fail(ExitCode::kData, "rank 2 has no data");
      try {
        group.barrier("never");
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ExitCode::kPeer);
        ++num_told;
        throw;
      }
    });
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kData);
  }
  EXPECT_EQ(num_told, 3);
}

TEST(ThreadGroup, MismatchedCallsFailInsteadOfHanging) {
  // One rank leaves early.
  EXPECT_THROW(run_ranks(3,
                         [](ProcessGroup& group) {
                           if (group.rank() != 0) group.barrier("b");
                         }),
               Error);
  // Different operations, sizes, counts.
  EXPECT_THROW(run_ranks(2,
                         [](ProcessGroup& group) {
                           at::Tensor x = at::ones({4});
                           if (group.rank() == 0) group.barrier("b");
                           if (group.rank() == 1) group.broadcast(x, 0, "x");
                         }),
               Error);
  EXPECT_THROW(
      run_ranks(2,
                [](ProcessGroup& group) { group.broadcast(at::ones({group.rank() + 1}), 0, "x"); }),
      Error);
  EXPECT_THROW(run_ranks(2,
                         [](ProcessGroup& group) {
                           // Rank 0 sends two elements to rank 1, which expects one.
                           const std::int64_t to_other = group.rank() == 0 ? 2 : 1;
                           std::vector<std::int64_t> sent{1, 1}, received{1, 1};
                           sent[group.rank() == 0 ? 1 : 0] = to_other;
                           group.all_to_all(at::empty({2}), received, at::ones({1 + to_other}),
                                            sent, "x");
                         }),
               Error);
}

}  // namespace
}  // namespace birkhoff
