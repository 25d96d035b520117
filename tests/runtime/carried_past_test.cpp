// What training carries from step to step: which tokens a step continues, and its part of
// checkpoints.
#include "runtime/carried_past.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>

#include "configs/loader/config_io.h"
#include "data/batch/partition.h"
#include "runtime/agreement.h"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/tasks/task.h"
#include "runtime/train_state.h"
#include "tests/cluster/base/thread_group.h"
#include "tests/runtime/checkpoint/checkpoint_fixture.h"

namespace birkhoff {
namespace {

constexpr std::int64_t kBatch = 6, kLayers = 2, kMemory = 10, kChannels = 8, kLength = 4;
constexpr std::int64_t kSteps = 5;  // per epoch

configs::Config past_config(int shards = 0) {
  return parse_config(
      "task { language_model {} } data { corpus: 'none' sequence_length: 4 } "
      "train { global_batch: 6 } model { layers: 2 channels: 8 heads: 2 positions: "
      "relative_sinusoidal memory { length: 10 } }",
      "test", {"train.invariant.shards=" + std::to_string(shards)});
}

// What the whole global batch leaves.
at::Tensor left_by_all(std::int64_t tokens, double first) {
  return at::arange(kBatch * kLayers * tokens * kChannels, at::kFloat)
      .add(first)
      .view({kBatch, kLayers, tokens, kChannels});
}

struct RankPast {
  RankPast(ProcessGroup& group, const configs::Config& config)
      : model(make_model(config, 11, at::kCPU)),
        rows(rank_share(kBatch, config.train().invariant().shards(), group.rank(), group.size())),
        past(config, *model, group, kBatch * kSteps) {}

  at::Tensor mine(const at::Tensor& all) const { return all.narrow(0, rows.begin, rows.size()); }
  Batch attached(std::int64_t step) const {
    Batch batch;
    batch.sample_ids_B = at::zeros({rows.size()}, at::kLong);
    past.attach(batch, step * kBatch);
    return batch;
  }

  std::unique_ptr<Model> model;
  Interval rows;
  CarriedPast past;
};

TEST(CarriedPast, IsTheLastTokensOfThePart) {
  run_ranks(2, [](ProcessGroup& group) {
    RankPast rank(group, past_config());
    EXPECT_FALSE(rank.attached(0).has(field::kPast));
    const at::Tensor first = left_by_all(4, 0), second = left_by_all(8, 1e4),
                     third = left_by_all(10, 2e4);
    rank.past.advance(rank.mine(first));
    EXPECT_TRUE(at::equal(rank.attached(1).at(field::kPast), rank.mine(first)));
    rank.past.advance(rank.mine(second));
    EXPECT_TRUE(at::equal(rank.attached(2).at(field::kPast), rank.mine(second)));
    rank.past.advance(rank.mine(third));
    for (const std::int64_t step : {3, 4, 8}) {
      EXPECT_TRUE(at::equal(rank.attached(step).at(field::kPast), rank.mine(third)));
    }
    // Each epoch begins without one, and a batch that had one loses it.
    EXPECT_FALSE(rank.attached(kSteps).has(field::kPast));
    Batch batch = rank.attached(4);
    rank.past.attach(batch, kSteps * kBatch);
    EXPECT_FALSE(batch.has(field::kPast));
    EXPECT_EQ(rank.attached(kSteps + 1).at(field::kPast).size(2), kLength);
  });
}

TEST(CarriedPast, ValuesThatAreNotFiniteAreDropped) {
  run_ranks(1, [](ProcessGroup& group) {
    RankPast rank(group, past_config());
    at::Tensor left = left_by_all(10, 1);
    left[0][0][3][2] = std::numeric_limits<double>::quiet_NaN();
    left[1][0][3][2] = std::numeric_limits<double>::infinity();
    rank.past.advance(left);
    const at::Tensor past = rank.attached(4).at(field::kPast);
    EXPECT_EQ(past[0][0][3][2].item<float>(), 0);
    EXPECT_EQ(past[1][0][3][2].item<float>(), 0);
    EXPECT_EQ((past != left).sum().item<std::int64_t>(), 2);
  });
}

TEST(CarriedPast, AModelWithoutMemoryCarriesNothing) {
  run_ranks(1, [](ProcessGroup& group) {
    configs::Config config = past_config();
    config.mutable_model()->mutable_memory()->set_length(0);
    RankPast rank(group, config);
    rank.past.advance({});
    EXPECT_FALSE(rank.attached(3).has(field::kPast));
    EXPECT_TRUE(rank.past.parts().empty());
  });
}

// Also to more ranks than the batch has rows.
TEST(CarriedPast, MovesBetweenAnyTwoNumbersOfRanks) {
  const at::Tensor left = left_by_all(10, 1);
  for (const int shards : {0, 3}) {
    const configs::Config config = past_config(shards);
    for (const int saved_ranks : {1, 2, 3, 4, 7}) {
      const TestFolder folder;
      run_ranks(saved_ranks, [&](ProcessGroup& group) {
        RankPast rank(group, config);
        rank.past.advance(rank.mine(left));
        CheckpointWriter writer(folder, 1, {}, group);
        writer.save(make_header(3), rank.past.parts());
        writer.finish();
      });
      const auto checkpoint = find_newest_checkpoint(folder, false);
      ASSERT_TRUE(checkpoint);
      for (const int ranks : {1, 2, 3, 4, 7}) {
        run_ranks(ranks, [&](ProcessGroup& group) {
          RankPast rank(group, config);
          std::vector<TensorPart> parts = rank.past.parts();
          load_checkpoint(*checkpoint, parts);
          EXPECT_TRUE(at::equal(rank.attached(4).at(field::kPast), rank.mine(left)))
              << saved_ranks << " to " << ranks << " ranks, rank " << group.rank();
        });
      }
    }
  }
}

// Ranks carry what they read, so they differ, whichever ranks hold copies of slices.
TEST(CarriedPast, IsNotComparedBetweenRanks) {
  for (const int size : {1, 2, 3}) {
    run_ranks(size, [&](ProcessGroup& group) {
      RankPast rank(group, past_config());
      rank.past.advance(rank.mine(left_by_all(10, 1)));
      Agreement agreement(group, group, rank.past.parts(), "host", /*copies=*/&group);
      EXPECT_EQ(agreement.find_difference(TrainState()), "");
    });
  }
}

}  // namespace
}  // namespace birkhoff
