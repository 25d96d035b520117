// Whole runs on point sets: data-parallel, with any stage of ZeRO, resumed.
#include <gtest/gtest.h>

#include "tests/data/point_corpus.h"
#include "tests/runtime/train_run_fixture.h"

namespace birkhoff {
namespace {

class PointRunMpi : public TrainRunMpi, public testing::WithParamInterface<std::string> {
 protected:
  void SetUp() override {
    TrainRunMpi::SetUp();
    if (rank() == 0) {
      write_cluster_sets((folder_ / "sets").string(),
                         {.points = 12, .dimensions = 2, .train = 48, .valid = 10});
    }
    test_world().group().barrier("point sets of the test");
  }

  configs::Config point_config(int steps, const std::vector<std::string>& more = {}) const {
    std::vector<std::string> settings = {
        "data.corpus=" + (folder_ / "sets").string(),
        "task.point_sets={ classes: 4 dimensions: 2 scaling: as_stored augment { resample: true "
        "rotation: 0.5 min_scale: 0.8 max_scale: 1.25 } set_transformer { inducing_points: 3 "
        "seeds: 2 pooling_attention: as_layers dropout: 0.2 } }",
        "data.sequence_length=9",
        "train.precision=fp64",
        "model.layers=2",
        "model.heads=4",
        "model.bias=true",
        "model.dropout.residual=0",
        "model.attention.0={ group { mechanism { " + GetParam() + " } } }"};
    settings.insert(settings.end(), more.begin(), more.end());
    return config(steps, settings);
  }
};

INSTANTIATE_TEST_SUITE_P(Attention, PointRunMpi,
                         testing::Values("dense {}", "sinkformer { half_steps: 3 dropout: 0.1 }"),
                         [](const auto& each) {
                           return std::string(each.index == 0 ? "dense" : "sinkformer");
                         });

TEST_P(PointRunMpi, StagesOfZeroTrainAlike) {
  EXPECT_EQ(train(point_config(8), "data"), Outcome::kDone);
  for (int stage = 1; stage <= 3; ++stage) {
    const std::string zero = "train.zero_stage=" + std::to_string(stage), run = "zero-" + zero;
    EXPECT_EQ(train(point_config(8, {zero, "train.recompute=true"}), run), Outcome::kDone);
    expect_same_figures(run, "data");
  }
  if (rank() != 0) return;
  EXPECT_TRUE(figures("data").back().contains("accuracy"));
}

TEST_P(PointRunMpi, AResumedRunEndsWithTheSameBits) {
  const std::vector<std::string> shards = {"train.invariant.shards=8", "train.micro_batch=0"};
  for (const auto& more : {std::vector<std::string>{}, shards}) {
    const std::string whole = more.empty() ? "whole" : "whole-shards",
                      parts = more.empty() ? "parts" : "parts-shards";
    EXPECT_EQ(train(point_config(12, more), whole), Outcome::kDone);
    EXPECT_EQ(train(point_config(7, more), parts), Outcome::kDone);
    EXPECT_EQ(train(point_config(12, more), parts), Outcome::kDone);
    if (rank() != 0) continue;
    EXPECT_FALSE(checksums(whole).empty());
    EXPECT_EQ(checksums(parts), checksums(whole));
  }
}

TEST_P(PointRunMpi, RefusesATensorAxis) {
  const int size = test_world().size();
  const configs::Config config = point_config(2, {"mesh.tensor=" + std::to_string(size)});
  if (size == 1) {
    EXPECT_EQ(train(config, "one"), Outcome::kDone);
    return;
  }
  expect_error([&] { train(config, "tensor"); }, ExitCode::kConfig,
               "mesh.tensor: must be 1 with task.point_sets");
}

}  // namespace
}  // namespace birkhoff
