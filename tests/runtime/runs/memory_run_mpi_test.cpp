// Whole runs of models with a memory, with any stage of ZeRO and after a stop.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/runtime/train_run_fixture.h"

namespace birkhoff {
namespace {

class MemoryRunMpi : public TrainRunMpi {
 protected:
  // 24 steps are more than an epoch, whose parts of the text have some 20 sequences.
  configs::Config memory_config(int steps, const std::vector<std::string>& more = {}) const {
    std::vector<std::string> settings = {
        "train.precision=fp64",
        "model.layers=2",
        "model.positions=relative_sinusoidal",
        "model.memory.length=24",
        "model.memory.evaluation_sequence_length=8",
        "model.memory.evaluation_length=40",
        "evaluate.every=12",
        "evaluate.sequences=20",
        "model.attention.0={ group { mechanism { dense { normalizer: top_k kept_keys: 12 dropout: "
        "0.1 } } } }"};
    settings.insert(settings.end(), more.begin(), more.end());
    return config(steps, settings);
  }
};

// Parameters that do not change give other losses with a longer memory, except where an epoch
// begins and it is empty.
TEST_F(MemoryRunMpi, StepsReadTheirMemory) {
  const std::vector<std::string> constant = {
      "train.schedule.learning_rate=0",
      "train.optimizer.adamw.weight_decay=0",
      "model.dropout.residual=0",
      "data.shift_windows=false",
      "evaluate.every=0",
      "metrics.every=1",
      "model.attention.0={ group { mechanism { dense {} } } }"};
  std::vector<std::string> one = constant;
  one.emplace_back("model.memory.length=1");
  EXPECT_EQ(train(memory_config(24, constant), "long"), Outcome::kDone);
  EXPECT_EQ(train(memory_config(24, one), "short"), Outcome::kDone);
  if (rank() != 0) return;
  const auto of_long = figures("long"), of_short = figures("short");
  std::vector<std::size_t> equal_steps;
  for (std::size_t i = 0; i < 24; ++i) {
    const double difference =
        of_long[i].at("loss").get<double>() - of_short[i].at("loss").get<double>();
    if (std::abs(difference) < 1e-12) equal_steps.push_back(i + 1);
  }
  ASSERT_EQ(equal_steps.size(), 2u) << "the first steps of two epochs";
  EXPECT_EQ(equal_steps[0], 1u);
  EXPECT_GT(equal_steps[1], 10u);
}

TEST_F(MemoryRunMpi, StagesOfZeroAndMicroBatchesTrainAlike) {
  EXPECT_EQ(train(memory_config(24, {"agreement.every=1"}), "data"), Outcome::kDone);
  for (const int stage : {1, 3}) {
    const std::string zero = "train.zero_stage=" + std::to_string(stage), run = "zero-" + zero;
    EXPECT_EQ(train(memory_config(24, {zero, "train.recompute=true"}), run), Outcome::kDone);
    expect_same_figures(run, "data");
  }
  EXPECT_EQ(train(memory_config(24, {"train.micro_batch=1"}), "micro"), Outcome::kDone);
  expect_same_figures("micro", "data");
}

TEST_F(MemoryRunMpi, CopiesOfSlicesCarryMemoriesOfTheirOwn) {
  if (test_world().size() < 4) GTEST_SKIP() << "needs 4 ranks";
  EXPECT_EQ(train(memory_config(8, {"mesh.ranks_per_node=2", "mesh.zero_inside_nodes=true",
                                    "train.zero_stage=1", "agreement.every=1"}),
                  "nodes"),
            Outcome::kDone);
}

TEST_F(MemoryRunMpi, AResumedRunEndsWithTheSameBits) {
  const std::vector<std::string> shards = {"train.invariant.shards=8", "train.micro_batch=0"};
  for (const auto& more : {std::vector<std::string>{}, shards}) {
    const std::string whole = more.empty() ? "whole" : "whole-shards",
                      parts = more.empty() ? "parts" : "parts-shards";
    EXPECT_EQ(train(memory_config(24, more), whole), Outcome::kDone);
    // While the memory fills in the first epoch, and in the second one.
    for (const int steps : {1, 22, 24}) {
      EXPECT_EQ(train(memory_config(steps, more), parts), Outcome::kDone);
    }
    if (rank() != 0) continue;
    const auto expected = checksums(whole);
    EXPECT_TRUE(expected.contains("memory@0"));
    EXPECT_EQ(checksums(parts), expected);
    EXPECT_EQ(figures(parts).back().at("loss"), figures(whole).back().at("loss"));
  }
}

TEST_F(MemoryRunMpi, TrainsInBf16) {
  EXPECT_EQ(train(memory_config(8, {"train.precision=bf16", "train.recompute=true"}), "bf16"),
            Outcome::kDone);
  EXPECT_EQ(train(memory_config(8, {"train.precision=fp32"}), "fp32"), Outcome::kDone);
  if (rank() != 0) return;
  // Rounding to bf16 is 0.4 % of a value.
  const double loss = figures("fp32").back().at("loss").get<double>();
  EXPECT_NEAR(figures("bf16").back().at("loss").get<double>(), loss, 0.02 * loss);
}

}  // namespace
}  // namespace birkhoff
