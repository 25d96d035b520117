// Whole runs of a language model with adaptive softmax and dropped tokens.
#include <gtest/gtest.h>

#include "tests/runtime/train_run_fixture.h"

namespace birkhoff {
namespace {

class AdaptiveRunMpi : public TrainRunMpi {
 protected:
  // Bytes of the text are in all parts.
  configs::Config adaptive_config(int steps, const std::vector<std::string>& more = {}) const {
    std::vector<std::string> settings = {"model.adaptive_softmax={ cutoff: [100, 106] divisor: 2 }",
                                         "model.dropout.token=0.1", "train.micro_batch=0"};
    settings.insert(settings.end(), more.begin(), more.end());
    return config(steps, settings);
  }
};

TEST_F(AdaptiveRunMpi, ResumesAndSlicesToTheSameBits) {
  for (const std::string precision : {"train.precision=fp32", "train.precision=bf16"}) {
    const std::string whole = "whole-" + precision, parts = "parts-" + precision;
    EXPECT_EQ(train(adaptive_config(8, {precision}), whole), Outcome::kDone);
    EXPECT_EQ(
        train(adaptive_config(3, {precision, "train.zero_stage=3", "train.recompute=true"}), parts),
        Outcome::kDone);
    EXPECT_EQ(train(adaptive_config(6, {precision, "train.zero_stage=1"}), parts), Outcome::kDone);
    EXPECT_EQ(train(adaptive_config(8, {precision}), parts), Outcome::kDone);
    if (rank() != 0) continue;
    EXPECT_FALSE(checksums(whole).empty());
    EXPECT_EQ(checksums(parts), checksums(whole));
    EXPECT_LT(figures(whole).back().at("loss"), figures(whole).front().at("loss"));
  }
}

TEST_F(AdaptiveRunMpi, RefusesCutoffsBeyondTheVocabularyAndOtherParts) {
  EXPECT_EQ(train(adaptive_config(2), "run"), Outcome::kDone);
  expect_error([&] { train(adaptive_config(4, {"model.adaptive_softmax.divisor=4"}), "run"); },
               ExitCode::kConfig, "model.adaptive_softmax.divisor");
  expect_error(
      [&] { train(adaptive_config(2, {"model.adaptive_softmax.cutoff=[100, 5000]"}), "beyond"); },
      ExitCode::kConfig, "model.adaptive_softmax.cutoff.1: 5000 leaves no ids for the last tail");
}

}  // namespace
}  // namespace birkhoff
