// Whole runs of models of pairs, on any mesh and with any stage of ZeRO.
#include <gtest/gtest.h>

#include "data/generate/generated_pairs.h"
#include "tests/runtime/train_run_fixture.h"

namespace birkhoff {
namespace {

class TranslationRunMpi : public TrainRunMpi {
 protected:
  void SetUp() override {
    TrainRunMpi::SetUp();
    if (rank() == 0) {
      generate_pairs((folder_ / "pairs").string(), {.task = "reverse",
                                                    .symbols = 12,
                                                    .train_length = 11,
                                                    .length = 14,
                                                    .samples = 200,
                                                    .test_samples = 21});
    }
    test_world().group().barrier("pairs of the test");
  }

  // Everything that draws noise or keeps a state.
  configs::Config pair_config(int steps, const std::vector<std::string>& more = {}) const {
    std::vector<std::string> settings = {
        "task.translation={ target_length: 12 }",
        "data.corpus=" + (folder_ / "pairs").string(),
        "train.precision=fp64",
        "model.heads=8",
        "model.bias=true",
        "model.dropout.embedding=0.1",
        "model.attention.0={ group { heads: 4 mechanism { dense { dropout: 0.1 } } } group { "
        "mechanism { routing { clusters: 4 dropout: 0.1 reseed_after: 2 } } } }",
        "model.encoder={ share_embedding: true attention { group { mechanism { sinkhorn { block: 4 "
        "gumbel_noise: true } } } } }"};
    settings.insert(settings.end(), more.begin(), more.end());
    return config(steps, settings);
  }
};

// Batches are narrower than data.sequence_length, and of several widths.
TEST_F(TranslationRunMpi, MeshesAndStagesOfZeroTrainAlike) {
  EXPECT_EQ(train(pair_config(8), "data"), Outcome::kDone);
  for (int stage = 1; stage <= 3; ++stage) {
    const std::string zero = "train.zero_stage=" + std::to_string(stage), run = "zero-" + zero;
    EXPECT_EQ(train(pair_config(8, {zero, "train.recompute=true"}), run), Outcome::kDone);
    expect_same_figures(run, "data");
  }
  for (int tensor = 2; tensor <= test_world().size(); tensor *= 2) {
    const std::string axis = "mesh.tensor=" + std::to_string(tensor), run = "tensor-" + axis;
    EXPECT_EQ(train(pair_config(8, {axis, "agreement.every=1"}), run), Outcome::kDone);
    expect_same_figures(run, "data");
    EXPECT_EQ(train(pair_config(8, {axis, "train.zero_stage=1"}), run + "-zero"), Outcome::kDone);
    expect_same_figures(run + "-zero", "data");
  }
  EXPECT_EQ(train(pair_config(8, {"train.micro_batch=1"}), "micro"), Outcome::kDone);
  expect_same_figures("micro", "data");
  if (rank() != 0) return;
  const auto last = figures("data").back();
  for (const char* name : {"accuracy", "accuracy_per_sequence"}) {
    EXPECT_TRUE(last.contains(name)) << last;
  }
}

// Steps of 128 tokens: 8 of the longest pairs, or more.
TEST_F(TranslationRunMpi, BatchesOfTokensAreTheSameOnAnyMeshAndAfterAStop) {
  const auto with = [&](int steps, std::vector<std::string> more = {}) {
    more.insert(more.end(), {"train.batch_tokens=128", "train.global_batch=8"});
    return pair_config(steps, more);
  };
  EXPECT_EQ(train(with(20), "data"), Outcome::kDone);
  EXPECT_EQ(train(with(20, {"train.zero_stage=3", "train.micro_batch=1"}), "zero"), Outcome::kDone);
  expect_same_figures("zero", "data");
  const std::string axis = "mesh.tensor=" + std::to_string(test_world().size());
  EXPECT_EQ(train(with(20, {axis}), "tensor"), Outcome::kDone);
  expect_same_figures("tensor", "data");
  EXPECT_EQ(train(with(9), "parts"), Outcome::kDone);
  EXPECT_EQ(train(with(20), "parts"), Outcome::kDone);
  if (rank() != 0) return;
  EXPECT_FALSE(checksums("data").empty());
  EXPECT_EQ(checksums("parts"), checksums("data"));
}

TEST_F(TranslationRunMpi, AResumedRunEndsWithTheSameBits) {
  const std::vector<std::string> shards = {"train.invariant.shards=8", "train.micro_batch=0"};
  for (const auto& more : {std::vector<std::string>{}, shards}) {
    const std::string whole = more.empty() ? "whole" : "whole-shards",
                      parts = more.empty() ? "parts" : "parts-shards";
    EXPECT_EQ(train(pair_config(12, more), whole), Outcome::kDone);
    EXPECT_EQ(train(pair_config(7, more), parts), Outcome::kDone);
    EXPECT_EQ(train(pair_config(12, more), parts), Outcome::kDone);
    if (rank() != 0) continue;
    EXPECT_FALSE(checksums(whole).empty());
    EXPECT_EQ(checksums(parts), checksums(whole));
  }
}

TEST_F(TranslationRunMpi, ARunGoesOnOnAnotherMesh) {
  const std::string axis = "mesh.tensor=" + std::to_string(test_world().size());
  EXPECT_EQ(train(pair_config(12), "whole"), Outcome::kDone);
  EXPECT_EQ(train(pair_config(4, {axis}), "parts"), Outcome::kDone);
  EXPECT_EQ(train(pair_config(12, {"train.zero_stage=1"}), "parts"), Outcome::kDone);
  expect_same_figures("parts", "whole");
}

TEST_F(TranslationRunMpi, TrainsInBf16) {
  EXPECT_EQ(train(pair_config(8, {"train.precision=bf16", "train.recompute=true"}), "bf16"),
            Outcome::kDone);
  EXPECT_EQ(train(pair_config(8, {"train.precision=fp32"}), "fp32"), Outcome::kDone);
  if (rank() != 0) return;
  const double loss = figures("fp32").back().at("loss").get<double>();
  EXPECT_NEAR(figures("bf16").back().at("loss").get<double>(), loss, 0.02 * loss);
}

}  // namespace
}  // namespace birkhoff
