// Whole runs on point sets: data-parallel, with any stage of ZeRO, resumed.
#include <gtest/gtest.h>

#include "tests/data/point_corpus.h"
#include "tests/runtime/train_run_fixture.h"

namespace birkhoff {
namespace {

struct Network {
  const char* name;
  std::vector<std::string> settings;
  bool cuts_batches = true;  // supports micro-batches, virtual shards and recomputation
};
void PrintTo(const Network& network, std::ostream* out) { *out << network.name; }

Network set_transformer(const char* name, const std::string& mechanism) {
  return {.name = name,
          .settings = {"task.point_sets.set_transformer={ inducing_points: 3 seeds: 2 "
                       "pooling_attention: as_layers dropout: 0.2 }",
                       "data.sequence_length=9", "model.heads=4",
                       "model.attention.0={ group { mechanism { " + mechanism + " } } }"}};
}

class PointRunMpi : public TrainRunMpi, public testing::WithParamInterface<Network> {
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
        "rotation: 0.5 min_scale: 0.8 max_scale: 1.25 } }",
        "train.precision=fp64",
        "model.layers=2",
        "model.bias=true",
        "model.dropout.residual=0"};
    settings.insert(settings.end(), GetParam().settings.begin(), GetParam().settings.end());
    settings.insert(settings.end(), more.begin(), more.end());
    return config(steps, settings);
  }
};

INSTANTIATE_TEST_SUITE_P(
    Networks, PointRunMpi,
    testing::Values(set_transformer("dense", "dense {}"),
                    set_transformer("sinkformer", "sinkformer { half_steps: 3 dropout: 0.1 }"),
                    Network{.name = "pct",
                            .settings = {"task.point_sets.point_cloud_transformer={ neighbors: 3 "
                                         "half_steps: 4 dropout: 0.2 }",
                                         "data.sequence_length=8", "model.heads=4",
                                         "train.micro_batch=0"},
                            .cuts_batches = false}),
    [](const auto& each) { return std::string(each.param.name); });

TEST_P(PointRunMpi, StagesOfZeroTrainAlike) {
  EXPECT_EQ(train(point_config(8), "data"), Outcome::kDone);
  for (int stage = 1; stage <= 3; ++stage) {
    std::vector<std::string> zero = {"train.zero_stage=" + std::to_string(stage)};
    const std::string run = "zero-" + zero[0];
    if (GetParam().cuts_batches) zero.emplace_back("train.recompute=true");
    EXPECT_EQ(train(point_config(8, zero), run), Outcome::kDone);
    expect_same_figures(run, "data");
  }
  if (test_world().size() == 4) {
    for (int stage = 0; stage <= 3; ++stage) {
      const std::string run = "nodes-" + std::to_string(stage);
      EXPECT_EQ(train(point_config(8, {"mesh.ranks_per_node=2",
                                       "train.zero_stage=" + std::to_string(stage)}),
                      run),
                Outcome::kDone);
      expect_same_figures(run, "data");
    }
  }
  if (rank() != 0) return;
  EXPECT_TRUE(figures("data").back().contains("accuracy"));
}

TEST_P(PointRunMpi, AResumedRunEndsWithTheSameBits) {
  std::vector<std::vector<std::string>> variants = {{}, {"train.zero_stage=3"}};
  if (GetParam().cuts_batches)
    variants.push_back({"train.invariant.shards=8", "train.micro_batch=0"});
  for (const auto& more : variants) {
    const std::string name = more.empty() ? "" : more[0];
    EXPECT_EQ(train(point_config(12, more), "whole" + name), Outcome::kDone);
    EXPECT_EQ(train(point_config(7, more), "parts" + name), Outcome::kDone);
    EXPECT_EQ(train(point_config(12, more), "parts" + name), Outcome::kDone);
    if (rank() != 0) continue;
    EXPECT_FALSE(checksums("whole" + name).empty());
    EXPECT_EQ(checksums("parts" + name), checksums("whole" + name));
  }
}

// The running statistics are in the checkpoint, and each step changes them, but no evaluation.
TEST_P(PointRunMpi, BatchNormsKeepRunningStatistics) {
  if (GetParam().cuts_batches) return;
  EXPECT_EQ(train(point_config(5), "five"), Outcome::kDone);
  EXPECT_EQ(train(point_config(6, {"evaluate.every=0"}), "six"), Outcome::kDone);
  EXPECT_EQ(train(point_config(6, {"evaluate.every=1"}), "evaluated"), Outcome::kDone);
  if (rank() != 0) return;
  const auto five = checksums("five"), six = checksums("six");
  EXPECT_EQ(checksums("evaluated"), six);
  int statistics = 0;
  for (const auto& [name, checksum] : five) {
    if (name.find(".running@") == std::string::npos) continue;
    ++statistics;
    EXPECT_NE(six.at(name), checksum) << name;
  }
  EXPECT_EQ(statistics, 13);
}

TEST_P(PointRunMpi, RefusesATensorAxis) {
  const int size = test_world().size();
  const auto train_on_axis = [&] {
    return train(point_config(2, {"mesh.tensor=" + std::to_string(size)}), "tensor");
  };
  if (size == 1) {
    EXPECT_EQ(train_on_axis(), Outcome::kDone);
    return;
  }
  expect_error(train_on_axis, ExitCode::kConfig, "mesh.tensor: must be 1 with task.point_sets");
}

TEST_P(PointRunMpi, BatchNormsRefuseRanksWithoutASet) {
  if (GetParam().cuts_batches || test_world().size() < 4) return;
  expect_error([&] { train(point_config(2, {"train.global_batch=3"}), "idle"); }, ExitCode::kConfig,
               "1 of 4 ranks compute nothing: train.global_batch = 3, and with batch norms all");
}

}  // namespace
}  // namespace birkhoff
