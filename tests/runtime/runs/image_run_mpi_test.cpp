// Whole runs on images: pixel models and classifiers, on any mesh and with any stage of ZeRO.
#include <gtest/gtest.h>

#include "tests/data/images/image_corpus.h"
#include "tests/runtime/train_run_fixture.h"

namespace birkhoff {
namespace {

class ImageRunMpi : public TrainRunMpi, public testing::WithParamInterface<std::string> {
 protected:
  void SetUp() override {
    TrainRunMpi::SetUp();
    if (rank() == 0) write_images((folder_ / "images").string(), {4, 4, 1});
    test_world().group().barrier("images of the test");
  }

  static bool of_pixels() { return GetParam() == "pixels"; }
  configs::Config image_config(int steps, const std::vector<std::string>& more = {}) const {
    std::vector<std::string> settings = {"data.corpus=" + (folder_ / "images").string(),
                                         "train.precision=fp64", "model.heads=8",
                                         "model.bias=true"};
    if (of_pixels()) {
      settings.insert(settings.end(),
                      {"task.pixel_model={}", "model.positions=image_axes",
                       "model.attention.0={ group { heads: 4 mechanism { sinkhorn { block: 4 "
                       "gumbel_noise: true } } } group { mechanism { routing { clusters: 4 "
                       "dropout: 0.1 } } } }"});
    } else {
      settings.insert(settings.end(),
                      {"task.image_classification={ classes: 3 patch: 2 pixel_mean: 0.4 "
                       "pixel_std: 0.3 augment { shift: 1 flip: true } }",
                       "data.sequence_length=5",
                       "model.attention.0={ group { mechanism { sinkformer { half_steps: 3 } } } "
                       "}"});
    }
    settings.insert(settings.end(), more.begin(), more.end());
    return config(steps, settings);
  }
};

INSTANTIATE_TEST_SUITE_P(Tasks, ImageRunMpi, testing::Values("pixels", "classes"),
                         [](const auto& each) { return each.param; });

TEST_P(ImageRunMpi, MeshesAndStagesOfZeroTrainAlike) {
  EXPECT_EQ(train(image_config(8), "data"), Outcome::kDone);
  for (int stage = 1; stage <= 3; ++stage) {
    const std::string zero = "train.zero_stage=" + std::to_string(stage), run = "zero-" + zero;
    EXPECT_EQ(train(image_config(8, {zero, "train.recompute=true"}), run), Outcome::kDone);
    expect_same_figures(run, "data");
  }
  for (int tensor = 2; tensor <= test_world().size(); tensor *= 2) {
    const std::string axis = "mesh.tensor=" + std::to_string(tensor), run = "tensor-" + axis;
    EXPECT_EQ(train(image_config(8, {axis, "agreement.every=1"}), run), Outcome::kDone);
    expect_same_figures(run, "data");
    EXPECT_EQ(train(image_config(8, {axis, "train.zero_stage=1"}), run + "-zero"), Outcome::kDone);
    expect_same_figures(run + "-zero", "data");
  }
  if (rank() != 0) return;
  const auto last = figures("data").back();
  EXPECT_TRUE(last.contains(of_pixels() ? "bits_per_dim" : "accuracy")) << last;
  if (of_pixels()) {
    EXPECT_NEAR(last.at("bits_per_dim").get<double>() * std::log(2.0),
                last.at("loss").get<double>(), 1e-12);
  }
}

TEST_P(ImageRunMpi, AResumedRunEndsWithTheSameBits) {
  const std::vector<std::string> shards = {"train.invariant.shards=8", "train.micro_batch=0"};
  for (const auto& more : {std::vector<std::string>{}, shards}) {
    const std::string whole = more.empty() ? "whole" : "whole-shards",
                      parts = more.empty() ? "parts" : "parts-shards";
    EXPECT_EQ(train(image_config(12, more), whole), Outcome::kDone);
    EXPECT_EQ(train(image_config(7, more), parts), Outcome::kDone);
    EXPECT_EQ(train(image_config(12, more), parts), Outcome::kDone);
    if (rank() != 0) continue;
    EXPECT_FALSE(checksums(whole).empty());
    EXPECT_EQ(checksums(parts), checksums(whole));
  }
}

TEST_P(ImageRunMpi, ARunGoesOnOnAnotherMesh) {
  const int size = test_world().size();
  EXPECT_EQ(train(image_config(12), "whole"), Outcome::kDone);
  EXPECT_EQ(train(image_config(4, {"mesh.tensor=" + std::to_string(size)}), "parts"),
            Outcome::kDone);
  EXPECT_EQ(train(image_config(12, {"train.zero_stage=1"}), "parts"), Outcome::kDone);
  expect_same_figures("parts", "whole");
}

TEST_P(ImageRunMpi, TrainsInBf16) {
  EXPECT_EQ(train(image_config(8, {"train.precision=bf16", "train.recompute=true"}), "bf16"),
            Outcome::kDone);
  EXPECT_EQ(train(image_config(8, {"train.precision=fp32"}), "fp32"), Outcome::kDone);
  if (rank() != 0) return;
  const double loss = figures("fp32").back().at("loss").get<double>();
  EXPECT_NEAR(figures("bf16").back().at("loss").get<double>(), loss, 0.02 * loss);
}

}  // namespace
}  // namespace birkhoff
