// A training that moves to another number of ranks: every bit of parameters and optimizer state
// arrives.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <map>

#include "runtime/checkpoint/checkpoint.h"
#include "runtime/run_checkpoints.h"
#include "tests/cluster/base/thread_group.h"
#include "tests/runtime/checkpoint/checkpoint_fixture.h"
#include "tests/runtime/optimizers/gathered_state.h"

namespace birkhoff {
namespace {

using test::gathered_state;
using test::toy_config;
using test::ToyTraining;

enum class Kind { kAdamW, kAdamWZero, kAdamWZero3, kAdafactor, kSgd, kSgdZero3 };

configs::Config config_with(Kind kind) {
  configs::Config config = toy_config(3);
  if (kind == Kind::kAdafactor) config.mutable_train()->mutable_optimizer()->mutable_adafactor();
  if (kind == Kind::kSgd || kind == Kind::kSgdZero3) {
    config.mutable_train()->mutable_optimizer()->mutable_sgd()->set_momentum(0.9f);
  }
  const bool stage_3 = kind == Kind::kAdamWZero3 || kind == Kind::kSgdZero3;
  config.mutable_train()->set_zero_stage(stage_3 ? 3 : kind == Kind::kAdamWZero ? 1 : 0);
  return config;
}

TEST(Elastic, StateMovesBetweenAnyTwoNumbersOfRanks) {
  const StopSignals signals;
  for (const auto& [saved_kind, kind] :
       {std::pair(Kind::kAdamW, Kind::kAdamW), std::pair(Kind::kAdamWZero, Kind::kAdamWZero),
        std::pair(Kind::kAdamWZero, Kind::kAdamW), std::pair(Kind::kAdamW, Kind::kAdamWZero),
        std::pair(Kind::kAdamWZero3, Kind::kAdamWZero3), std::pair(Kind::kAdamWZero3, Kind::kAdamW),
        std::pair(Kind::kAdamWZero, Kind::kAdamWZero3),
        std::pair(Kind::kAdafactor, Kind::kAdafactor), std::pair(Kind::kSgdZero3, Kind::kSgd),
        std::pair(Kind::kSgd, Kind::kSgdZero3)}) {
    const configs::Config saved_config = config_with(saved_kind), config = config_with(kind);
    for (const int saved_ranks : {1, 2, 3, 4, 6}) {
      const TestFolder folder;
      std::map<std::string, std::string> expected;
      run_ranks(saved_ranks, [&](ProcessGroup& group) {
        ToyTraining training(saved_config, group, at::kFloat);
        training.run(signals);
        CheckpointWriter writer(folder, 1, {}, group);
        writer.save(make_header(3), training_parts(training.model, training.buckets,
                                                   *training.optimizer, saved_ranks));
        writer.finish();
        const std::map<std::string, std::string> state = gathered_state(training, group);
        if (group.rank() == 0) expected = state;
      });
      ASSERT_GT(expected.size(), 5u);
      const auto checkpoint = find_newest_checkpoint(folder, false);
      ASSERT_TRUE(checkpoint);
      for (const int ranks : {1, 2, 3, 4, 6}) {
        run_ranks(ranks, [&](ProcessGroup& group) {
          ToyTraining training(config, group, at::kFloat);
          EXPECT_NE(gathered_state(training, group), expected)
              << "a fresh one holds something else";
          std::vector<TensorPart> parts =
              training_parts(training.model, training.buckets, *training.optimizer, ranks);
          load_checkpoint(*checkpoint, parts);
          EXPECT_EQ(gathered_state(training, group), expected)
              << saved_ranks << " to " << ranks << " ranks, rank " << group.rank();
        });
      }
    }
  }
}

}  // namespace
}  // namespace birkhoff
