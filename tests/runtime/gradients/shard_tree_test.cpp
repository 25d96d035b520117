#include "runtime/gradients/shard_tree.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "data/batch/partition.h"
#include "runtime/gradients/shard_reduction.h"
#include "tests/cluster/base/thread_group.h"

namespace birkhoff {
namespace {

// Values whose fp32 sum depends on the order of addition.
at::Tensor shard_values(std::int64_t shard, std::int64_t elements) {
  const at::Tensor i = at::arange(elements, at::kDouble);
  return (at::sin(i * 0.7 + shard) * at::exp2((i + 5 * shard).remainder(17))).to(at::kFloat);
}

// The definition: a node is the sum of its halves.
at::Tensor node_sum(std::int64_t begin, std::int64_t end, std::int64_t elements) {
  if (end - begin == 1) return shard_values(begin, elements);
  const std::int64_t middle = begin + (end - begin) / 2;
  return node_sum(begin, middle, elements) + node_sum(middle, end, elements);
}

TEST(ShardTree, NodesOfARangeAreTheFewestThatCoverIt) {
  for (std::int64_t n = 1; n <= 24; ++n) {
    EXPECT_EQ(nodes_of({0, n}, n).size(), 1u);
    EXPECT_TRUE(nodes_of({0, 0}, n).empty());
    for (std::int64_t begin = 0; begin < n; ++begin) {
      for (std::int64_t end = begin + 1; end <= n; ++end) {
        const std::vector<Interval> nodes = nodes_of({begin, end}, n);
        std::int64_t at = begin;
        for (std::size_t i = 0; i < nodes.size(); ++i) {
          EXPECT_EQ(nodes[i].begin, at);
          EXPECT_GT(nodes[i].end, at);
          at = nodes[i].end;
          EXPECT_FALSE(i > 0 && are_halves(nodes[i - 1], nodes[i], n));
        }
        EXPECT_EQ(at, end);
      }
    }
  }
  EXPECT_TRUE(are_halves({0, 3}, {3, 6}, 12));
  EXPECT_FALSE(are_halves({3, 6}, {6, 9}, 12));
  EXPECT_FALSE(are_halves({0, 1}, {1, 3}, 4));
}

TEST(ShardTree, SumsAlongTheTreeHoweverTheShardsAreGrouped) {
  constexpr std::int64_t kElements = 33;
  for (const std::int64_t n : {1, 2, 3, 5, 8, 12, 13}) {
    const at::Tensor expected = node_sum(0, n, kElements);
    ShardSum sum(n);
    for (int step = 0; step < 2; ++step) {  // the second reuses the first one's memory
      for (std::int64_t s = 0; s < n; ++s) {
        const at::Tensor values = shard_values(s, kElements);
        sum.add({s, s + 1}, values);
        EXPECT_TRUE(at::equal(values, shard_values(s, kElements)))
            << "add() only reads its argument";
      }
      ASSERT_EQ(sum.sums().size(), 1u);
      EXPECT_TRUE(at::equal(sum.sums()[0], expected));
      sum.clear();
    }
  }
  // The order must matter for these values; else the test would prove nothing.
  at::Tensor in_order = at::zeros({kElements});
  for (std::int64_t s = 0; s < 13; ++s) in_order += shard_values(s, kElements);
  EXPECT_FALSE(at::equal(in_order, node_sum(0, 13, kElements)));
}

TEST(ShardReduction, AnyNumberOfRanksGivesTheSameBits) {
  constexpr std::int64_t kElements = 420;  // a multiple of every number of ranks below
  for (const std::int64_t n : {1, 4, 6, 12, 13}) {
    const at::Tensor expected = node_sum(0, n, kElements);
    for (const int size : {1, 2, 3, 4, 6, 7}) {
      run_ranks(size, [&](ProcessGroup& group) {
        const at::Tensor gradients = at::empty({kElements});
        const Interval mine = partition(n, group.rank(), group.size());
        const Interval all{0, kElements}, slice = partition(kElements, group.rank(), group.size());
        for (const bool slice_only : {false, true}) {
          const at::Tensor sums = slice_only && size > 1 ? at::empty({slice.size()}) : gradients;
          ShardReduction reduction(group, n, gradients, sums);
          for (const bool one_pass : {false, true, false}) {
            gradients.zero_();
            for (std::int64_t s = mine.begin; s < mine.end; ++s) {
              if (s > mine.begin) reduction.next_shard(one_pass);
              gradients.add_(shard_values(s, kElements));
            }
            reduction.start("sums");
            reduction.combine("slices");
            reduction.finish();
            const Interval summed = slice_only ? slice : all;
            EXPECT_TRUE(at::equal(sums, expected.narrow(0, summed.begin, summed.size())))
                << n << " shards, " << size << " ranks, slices only: " << slice_only
                << ", one pass: " << one_pass;
          }
        }
      });
    }
  }
}

TEST(RankShare, CoversTheBatchOnceWithWholeShards) {
  for (const std::int64_t batch : {1, 7, 12, 64}) {
    for (std::int64_t shards = 0; shards <= batch; ++shards) {
      for (const int size : {1, 2, 3, 4, 6, 9}) {
        std::int64_t at = 0;
        for (int rank = 0; rank < size; ++rank) {
          const Interval share = rank_share(batch, shards, rank, size);
          EXPECT_EQ(share.begin, at);
          at = share.end;
          bool whole = shards == 0;
          for (std::int64_t s = 0; s <= shards; ++s) {
            whole = whole || share.begin == batch * s / shards;
          }
          EXPECT_TRUE(whole) << "a share begins where a shard begins";
        }
        EXPECT_EQ(at, batch);
      }
    }
  }
}

}  // namespace
}  // namespace birkhoff
