// Whole runs of models with a memory, with any stage of ZeRO and after a stop.
#include <gtest/gtest.h>

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
  if (test_world().size() < 4) return;
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
