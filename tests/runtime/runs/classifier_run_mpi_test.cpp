// Whole runs of classifiers of pairs, with class weights and with an end by evaluate.patience, on
// any mesh and with any stage of ZeRO.
#include <gtest/gtest.h>

#include <fmt/format.h>

#include "tests/runtime/train_run_fixture.h"

namespace birkhoff {
namespace {

class ClassifierRunMpi : public TrainRunMpi, public testing::WithParamInterface<std::string> {
 protected:
  void SetUp() override {
    TrainRunMpi::SetUp();
    if (rank() == 0) {
      for (const auto& [name, rows] : {std::pair("train", 60), {"valid", 21}}) {
        std::ofstream table(folder_ / fmt::format("{}.tsv", name));
        for (int i = 0; i < rows; ++i) {
          table << std::string(static_cast<std::size_t>(i % 7 + 1), static_cast<char>('a' + i % 5))
                << '\t' << (i * i % 7 < 3 ? "yes" : "no") << '\t'
                << std::string(static_cast<std::size_t>(i % 11 + 1), static_cast<char>('a' + i % 3))
                << '\n';
        }
      }
      PrepareOptions options;
      options.out = (folder_ / "pairs").string();
      options.paths = {(folder_ / "train.tsv").string()};
      options.valid_paths = {(folder_ / "valid.tsv").string()};
      options.table = TableColumns{.text = "1", .label = "2", .second = "3"};
      prepare_corpus(options);
    }
    test_world().group().barrier("pairs of the test");
  }

  // Everything that draws noise or keeps a state.
  configs::Config pair_config(int steps, const std::vector<std::string>& more = {}) const {
    std::vector<std::string> settings = {
        "task.classification={ second_stream: 'second' pair_model: " + GetParam() +
            " class_weight: 3 class_weight: 0.1 }",
        "data.corpus=" + (folder_ / "pairs").string(),
        "data.sequence_length=12",
        "train.precision=fp64",
        "metrics.every=1",
        "model.heads=8",
        "model.bias=true",
        "model.dropout.embedding=0.1",
        "model.attention.0={ group { heads: 4 mechanism { sinkhorn { block: 4 gumbel_noise: true } "
        "} } group { mechanism { routing { clusters: 4 dropout: 0.1 reseed_after: 2 commitment: 0.1 "
        "} } } }"};
    settings.insert(settings.end(), more.begin(), more.end());
    return config(steps, settings);
  }
  // No state changes, so the first loss stays the lowest.
  configs::Config patient_config(int patience, std::vector<std::string> more = {}) const {
    more.insert(more.end(), {"model.attention.0={ group { mechanism { dense {} } } }",
                             "train.schedule.learning_rate=0", "train.schedule.warmup_steps=0",
                             "evaluate.patience=" + std::to_string(patience)});
    return pair_config(40, more);
  }
  std::int64_t newest_step(const std::string& run) const {
    return find_newest_checkpoint(folder_ / run / "checkpoints", false)->manifest.step();
  }
  // As if the run had been killed before its last checkpoint.
  void lose_newest_checkpoint(const std::string& run) const {
    if (rank() == 0) {
      std::filesystem::remove_all(
          find_newest_checkpoint(folder_ / run / "checkpoints", false)->path);
    }
    test_world().group().barrier("lost checkpoint");
  }
};

INSTANTIATE_TEST_SUITE_P(Pairs, ClassifierRunMpi, testing::Values("joined", "two_towers"),
                         [](const auto& each) { return each.param; });

class PatienceRunMpi : public ClassifierRunMpi {};
INSTANTIATE_TEST_SUITE_P(Pairs, PatienceRunMpi, testing::Values("joined"));

TEST_P(ClassifierRunMpi, MeshesAndStagesOfZeroTrainAlike) {
  EXPECT_EQ(train(pair_config(5), "data"), Outcome::kDone);
  const auto train_alike = [&](const std::vector<std::string>& more, const std::string& run) {
    EXPECT_EQ(train(pair_config(5, more), run), Outcome::kDone);
    expect_same_figures(run, "data");
  };
  train_alike({"train.micro_batch=1"}, "micro");
  train_alike({"train.zero_stage=3", "train.recompute=true"}, "zero");
  if (test_world().size() > 1) {
    train_alike({"mesh.tensor=2", "train.zero_stage=1", "agreement.every=1"}, "tensor");
  }
  if (rank() != 0) return;
  const auto last = figures("data").back();
  EXPECT_TRUE(last.contains("macro_f1") && last.contains("accuracy")) << last;
}

TEST_P(ClassifierRunMpi, AResumedRunEndsWithTheSameBits) {
  for (const auto& more :
       {std::vector<std::string>{"train.invariant.shards=8", "train.micro_batch=0"},
        {"train.batch_tokens=60", "train.global_batch=5", "train.micro_batch=0"}}) {
    EXPECT_EQ(train(pair_config(6, more), more[0] + "-whole"), Outcome::kDone);
    EXPECT_EQ(train(pair_config(3, more), more[0] + "-parts"), Outcome::kDone);
    EXPECT_EQ(train(pair_config(6, more), more[0] + "-parts"), Outcome::kDone);
    if (rank() != 0) continue;
    EXPECT_FALSE(checksums(more[0] + "-whole").empty());
    EXPECT_EQ(checksums(more[0] + "-parts"), checksums(more[0] + "-whole"));
  }
}

// Evaluations at steps 4, 8, 12, ...; saves at 5, 10, ... and the end.
TEST_P(PatienceRunMpi, PatienceEndsTrainingAtTheSameStepAfterAKill) {
  EXPECT_EQ(train(patient_config(3), "run"), Outcome::kDone);
  const auto at_the_end = checksums("run");
  const auto lines = figures("run");
  EXPECT_EQ(newest_step("run"), 16);
  EXPECT_EQ(lines.back().at("step"), 16);
  test_world().group().barrier("read");
  // The same command does nothing more.
  EXPECT_EQ(train(patient_config(3), "run"), Outcome::kDone);
  EXPECT_EQ(figures("run"), lines);
  // From step 15, of the same mesh and of another.
  for (const auto& more : {std::vector<std::string>{},
                           {"mesh.tensor=" + std::to_string(test_world().size())},
                           {"train.zero_stage=1"}}) {
    lose_newest_checkpoint("run");
    EXPECT_EQ(newest_step("run"), 15);
    EXPECT_EQ(train(patient_config(3, more), "run"), Outcome::kDone);
    EXPECT_EQ(newest_step("run"), 16);
    if (more.empty()) {
      EXPECT_EQ(checksums("run"), at_the_end);
      EXPECT_EQ(figures("run"), lines);
    }
    test_world().group().barrier("read");
  }
  // More patience continues; other losses begin a count of their own.
  EXPECT_EQ(train(patient_config(5), "run"), Outcome::kDone);
  EXPECT_EQ(newest_step("run"), 24);
  test_world().group().barrier("read");
  EXPECT_EQ(train(patient_config(2, {"evaluate.sequences=20"}), "run"), Outcome::kDone);
  EXPECT_EQ(newest_step("run"), 36);
}

TEST_P(PatienceRunMpi, PatienceNeedsEvaluations) {
  expect_error([&] { train(patient_config(3, {"evaluate.split=test"}), "run"); }, ExitCode::kConfig,
               "evaluate.patience: 3 has no effect");
}

}  // namespace
}  // namespace birkhoff
