// A training that moves to another number of ranks: parameters and optimizer state arrive with
// every bit.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <map>

#include "cluster/base/thread_group.h"
#include "runtime/checkpoint.h"
#include "runtime/run_checkpoints.h"
#include "tests/runtime/checkpoint_fixture.h"
#include "tests/runtime/toy_training.h"

namespace birkhoff {
namespace {

using test::toy_config;
using test::ToyTraining;

// All of a rank's state as bytes by name, however it is cut into shards.
std::map<std::string, std::string> state_of(ToyTraining& training, int num_ranks) {
  std::map<std::string, std::map<std::int64_t, std::string>> parts;
  for (const NamedShard& shard : training_shards(training.model, *training.optimizer, num_ranks)) {
    parts[shard.name][shard.flat_begin] =
        std::string(static_cast<const char*>(shard.data.const_data_ptr()), shard.data.nbytes());
  }
  std::map<std::string, std::string> state;
  for (const auto& [name, by_place] : parts) {
    for (const auto& [place, bytes] : by_place) state[name] += bytes;
  }
  return state;
}

configs::Config config_with(bool adafactor) {
  configs::Config config = toy_config(3);
  if (adafactor) config.mutable_train()->mutable_optimizer()->mutable_adafactor();
  return config;
}

TEST(Elastic, StateMovesBetweenAnyTwoNumbersOfRanks) {
  const StopSignals signals;
  for (const bool adafactor : {false, true}) {
    const configs::Config config = config_with(adafactor);
    for (const int saved_ranks : {1, 2, 3, 4, 6}) {
      const TestFolder folder;
      std::map<std::string, std::string> expected;
      run_ranks(saved_ranks, [&](Group& group) {
        ToyTraining training(config, group, at::kFloat);
        training.run(signals);
        CheckpointWriter writer(folder, 1, {}, group);
        writer.save(make_header(3),
                    training_shards(training.model, *training.optimizer, saved_ranks));
        writer.finish();
        if (group.rank() == 0) expected = state_of(training, saved_ranks);
      });
      ASSERT_GT(expected.size(), 5u);
      const auto checkpoint = find_newest_checkpoint(folder, false);
      ASSERT_TRUE(checkpoint);
      for (const int ranks : {1, 2, 3, 4, 6}) {
        run_ranks(ranks, [&](Group& group) {
          ToyTraining training(config, group, at::kFloat);
          EXPECT_NE(state_of(training, ranks), expected) << "a fresh one holds something else";
          std::vector<NamedShard> shards =
              training_shards(training.model, *training.optimizer, ranks);
          load_checkpoint(*checkpoint, shards);
          EXPECT_EQ(state_of(training, ranks), expected)
              << saved_ranks << " to " << ranks << " ranks, rank " << group.rank();
        });
      }
    }
  }
}

}  // namespace
}  // namespace birkhoff
