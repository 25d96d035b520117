// The requirements of a CUDA graph on a step, tested on the CPU: StepGraph keeps the recorded part
// there, so a value that the part holds, and does not read from memory, stays as it was.
#include "runtime/step_graph.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "cluster/base/error.h"
#include "tests/cluster/base/thread_group.h"
#include "tests/runtime/toy_training.h"

namespace birkhoff {
namespace {

using test::toy_batch;
using test::toy_config;
using test::ToyTraining;

TEST(StepGraph, KeepsWhatARecordingWouldKeep) {
  StepGraph graph(/*recorded=*/true, at::kCPU), direct(/*recorded=*/false, at::kCPU);
  std::vector<int> seen, seen_directly;
  for (int i = 0; i < StepGraph::kWarmUpRuns + 3; ++i) {
    graph.run([&, i] { seen.push_back(i); });
    direct.run([&, i] { seen_directly.push_back(i); });
  }
  EXPECT_EQ(seen, (std::vector{0, 1, 2, 3, 3, 3}));
  EXPECT_EQ(seen_directly, (std::vector{0, 1, 2, 3, 4, 5}));
}

TEST(StaticBatch, StaysWhereItIsAndTakesNewValues) {
  StaticBatch fixed;
  const Batch first = fixed.hold(toy_batch(0, 4));
  for (std::int64_t begin : {7, 12, 3}) {
    const Batch given = toy_batch(begin, begin + 4), held = fixed.hold(given);
    ASSERT_EQ(held.fields.size(), given.fields.size());
    for (const auto& [name, tensor] : given.fields) {
      EXPECT_TRUE(at::equal(held.at(name), tensor)) << name;
      EXPECT_EQ(held.at(name).data_ptr(), first.at(name).data_ptr()) << name;
      EXPECT_NE(held.at(name).data_ptr(), tensor.data_ptr()) << name;
    }
    EXPECT_TRUE(at::equal(held.sample_ids_B, given.sample_ids_B));
    EXPECT_EQ(held.sample_ids_B.data_ptr(), first.sample_ids_B.data_ptr());
  }
  EXPECT_THROW(fixed.hold(toy_batch(0, 5)), Error);
  Batch other = toy_batch(0, 4);
  other.fields.erase("mask");
  EXPECT_THROW(fixed.hold(other), Error);
  other.fields["positions"] = at::zeros({4, 5}, at::kLong);
  EXPECT_THROW(fixed.hold(other), Error);
}

// Noise, samples, loss scale, learning rate, clip factor and skipped steps change from step to
// step, and a recorded step sees the changes.
TEST(Trainer, ARecordedStepHasTheSameBits) {
  const StopSignals signals;
  for (const int size : {1, 2, 16}) {  // 16 ranks share 12 samples: some have none
    for (const bool zero : {false, true}) {
      for (const int micro_batch : {0, 2}) {
        run_ranks(size, [&](ProcessGroup& group) {
          configs::Config config = toy_config(14);
          config.mutable_train()->set_micro_batch(micro_batch);
          config.mutable_train()->set_zero_stage(zero);
          config.mutable_train()->set_precision(configs::Train::fp16);  // a loss scale that changes
          const auto train = [&](bool recorded) {
            config.mutable_train()->set_cuda_graph(recorded);
            auto training = std::make_unique<ToyTraining>(config, group, at::kFloat);
            training->state.loss_scale.value = 0x1p-3;
            training->state.loss_scale.steps_since = LossScale::kGrowAfter - 6;
            training->model.spoil(9, 100);
            EXPECT_EQ(training->run(signals), Outcome::kDone);
            return training;
          };
          const auto plain = train(false), recorded = train(true);
          EXPECT_EQ(plain->state.loss_scale.value, 0x1p-2) << "the test must grow the scale";
          EXPECT_EQ(recorded->state.loss_scale.value, plain->state.loss_scale.value);
          EXPECT_EQ(recorded->state.tokens, plain->state.tokens);
          EXPECT_TRUE(at::equal(recorded->parameters(), plain->parameters())) << size << zero;
        });
      }
    }
  }
}

}  // namespace
}  // namespace birkhoff
