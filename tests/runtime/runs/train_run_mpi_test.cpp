// Whole runs on several ranks: from a corpus on disk to metrics and checkpoints, interrupted and
// resumed. Compiled twice: for CPUs over MPI, and with BIRKHOFF_TEST_DEVICE=cuda for GPUs over
// NCCL, which ranks may share.
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <cmath>

#include "cluster/base/instruction_set.h"
#include "data/corpus/corpus.h"
#include "runtime/run_checks.h"
#include "tests/runtime/train_run_fixture.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;

TEST_F(TrainRunMpi, AResumedRunEndsWithTheSameBits) {
  EXPECT_EQ(train(config(12), "whole"), Outcome::kDone);
  // train.steps is free: a longer run resumes from there.
  EXPECT_EQ(train(config(7), "parts"), Outcome::kDone);
  if (rank() == 0) {
    // What a killed run leaves after its checkpoint: cut off on resume.
    std::ofstream(folder_ / "parts" / "metrics.jsonl", std::ios::app)
        << "{\"step\":8,\"loss\":1.0}\n{\"step\":9,\"lo";
  }
  EXPECT_EQ(train(config(12), "parts"), Outcome::kDone);
  if (rank() != 0) return;
  EXPECT_FALSE(checksums("whole").empty());
  EXPECT_EQ(checksums("whole"), checksums("parts"));
  // The shorter run also reported, and evaluated at, its own last step.
  std::vector<nlohmann::json> whole = figures("whole"), parts = figures("parts");
  std::erase_if(parts, [](const nlohmann::json& line) { return line.at("step") == 7; });
  EXPECT_EQ(whole, parts);
  ASSERT_EQ(whole.size(), 6u + 3u);  // steps 2, 4, ... 12; evaluations at 4, 8, 12
  EXPECT_GT(whole.back().at("bits_per_byte").get<double>(), 0);
  EXPECT_EQ(whole.back().at("split"), "valid");
  EXPECT_TRUE(fs::exists(folder_ / "whole" / "loss.svg"));
  EXPECT_TRUE(fs::exists(folder_ / "whole" / "config.txtpb"));
  for (int r = 0; r < test_world().size(); ++r) {
    EXPECT_TRUE(fs::exists(folder_ / "whole" / "log" / ("rank-" + std::to_string(r) + ".log")));
  }
}

// A run that takes all weights of another one, and changes none, has its loss.
TEST_F(TrainRunMpi, AWarmStartBeginsWithTheWeightsOfAnotherRun) {
  EXPECT_EQ(train(config(8), "first"), Outcome::kDone);
  const std::vector<std::string> warm = {"train.warm_start.from=" + (folder_ / "first").string(),
                                         "train.schedule.learning_rate=0",
                                         "train.schedule.final_learning_rate=0"};
  EXPECT_EQ(train(config(4, warm), "warm"), Outcome::kDone);
  std::vector<std::string> sliced = warm;
  sliced.insert(sliced.end(), {"train.zero_stage=3", "train.micro_batch=0", "train.seed=9"});
  EXPECT_EQ(train(config(4, sliced), "sliced"), Outcome::kDone);
  if (rank() != 0) return;
  const auto loss = [&](const std::string& run) { return figures(run).back().at("loss"); };
  EXPECT_EQ(loss("warm"), loss("first"));
  EXPECT_EQ(loss("sliced"), loss("first"));
  const std::string log =
      read_file((folder_ / "warm" / "log" / "rank-0.log").string(), 1 << 20, ExitCode::kData);
  EXPECT_NE(log.find("warm start: "), std::string::npos) << log;
  EXPECT_EQ(log.find("random values"), std::string::npos) << log;
}

TEST_F(TrainRunMpi, ZeroMayBeSwitchedWhenARunGoesOnAndChangesNoBit) {
  EXPECT_EQ(train(config(12), "whole"), Outcome::kDone);
  EXPECT_EQ(train(config(4, {"train.zero_stage=1"}), "parts"), Outcome::kDone);
  EXPECT_EQ(train(config(8), "parts"), Outcome::kDone);
  EXPECT_EQ(train(config(12, {"train.zero_stage=1"}), "parts"), Outcome::kDone);
  if (rank() != 0) return;
  EXPECT_FALSE(checksums("whole").empty());
  EXPECT_EQ(checksums("parts"), checksums("whole"));
  EXPECT_EQ(figures("parts"), figures("whole"));
  const std::string log =
      read_file((folder_ / "parts" / "log" / "rank-0.log").string(), 1 << 20, ExitCode::kData);
  EXPECT_EQ(log.find(" slices (train.zero_stage)") != std::string::npos, test_world().size() > 1)
      << log;
}

// Each rank has one pass, with its own number of sequences; evaluations and saves are in slices.
TEST_F(TrainRunMpi, StagesOfZeroMayBeSwitchedWhenARunGoesOnAndChangeNoBit) {
  const std::string one_pass = "train.micro_batch=0";
  for (const std::string shards : {"train.invariant.shards=0", "train.invariant.shards=8"}) {
    const std::string whole = "whole" + shards, parts = "parts" + shards;
    EXPECT_EQ(train(config(12, {one_pass, shards}), whole), Outcome::kDone);
    EXPECT_EQ(train(config(4, {one_pass, shards, "train.zero_stage=3"}), parts), Outcome::kDone);
    EXPECT_EQ(train(config(8, {one_pass, shards, "train.zero_stage=2"}), parts), Outcome::kDone);
    EXPECT_EQ(train(config(10, {one_pass, shards, "train.zero_stage=3", "train.recompute=true",
                                "evaluate.every=0"}),
                    parts),
              Outcome::kDone);
    EXPECT_EQ(train(config(12, {one_pass, shards}), parts), Outcome::kDone);
    if (rank() != 0) continue;
    EXPECT_FALSE(checksums(whole).empty());
    EXPECT_EQ(checksums(parts), checksums(whole));
    std::vector<nlohmann::json> of_parts = figures(parts);
    std::erase_if(of_parts, [](const nlohmann::json& line) {
      return line.at("step") == 10 && line.contains("split");
    });
    EXPECT_EQ(of_parts, figures(whole));
  }
}

TEST_F(TrainRunMpi, ZeroStages2And3NeedASequenceForEachRank) {
  if (test_world().size() < 3) GTEST_SKIP() << "needs 3 ranks";
  expect_error(
      [&] {
        train(config(2, {"train.global_batch=2", "train.micro_batch=0", "train.zero_stage=3"}),
              "idle");
      },
      ExitCode::kConfig,
      "compute nothing: train.global_batch = 2, and with train.zero_stage 3 all must make the same "
      "passes; start at most 2 data-parallel ranks, or use zero_stage 1");
}

TEST(WarningOfNodes, ComparesTheRanksOfANodeWithHosts) {
  configs::Config config;
  const auto warning = [&](int ranks_per_node, const std::vector<std::string>& hosts) {
    config.mutable_mesh()->set_ranks_per_node(ranks_per_node);
    return warning_of_nodes(config, hosts);
  };
  const std::vector<std::string> one{"a", "a", "a", "a"}, two{"a", "a", "b", "b"},
      apart{"a", "b", "c", "d"}, mixed{"a", "b", "a", "b"}, uneven{"a", "a", "b"};
  for (const auto& hosts : {one, apart, mixed, uneven}) EXPECT_EQ(warning(0, hosts), "");
  EXPECT_EQ(warning(0, two),
            "each of the 2 hosts sends its gradients 2 times: set mesh.ranks_per_node: 2 to add "
            "them inside hosts first (this changes the order of sums)");
  EXPECT_EQ(warning(2, two), "");
  EXPECT_EQ(warning(2, one), "");
  for (const int no_effect : {1, 4}) {
    EXPECT_NE(warning(no_effect, two).find("has no effect with 4 ranks"), std::string::npos);
  }
  for (const auto& hosts : {apart, mixed}) {
    EXPECT_NE(warning(2, hosts).find("on several hosts"), std::string::npos);
  }
  config.mutable_train()->mutable_invariant()->set_shards(4);
  EXPECT_EQ(warning(0, two), "") << "virtual shards take one level";
}

TEST(WarningOfReplicas, NamesTheFirstReplicaThatIsOnTwoHosts) {
  configs::Config config;
  config.mutable_mesh()->set_tensor(2);
  EXPECT_EQ(warning_of_replicas(config, {"a", "a", "b", "b"}), "");
  EXPECT_NE(
      warning_of_replicas(config, {"a", "a", "a", "b"})
          .find("mesh.tensor: 2: ranks 2 and 3 hold parts of one model on two hosts, a and b"),
      std::string::npos);
  config.mutable_mesh()->set_tensor(1);
  EXPECT_EQ(warning_of_replicas(config, {"a", "b", "a", "b"}), "");
}

TEST(WarningOfPrecision, NamesTheFastChoiceOfTheCpu) {
  configs::Config config;
  const auto warning = [&](configs::Config::Device device, configs::Train::Precision precision) {
    config.set_device(device);
    config.mutable_train()->set_precision(precision);
    return warning_of_precision(config);
  };
  const bool has_avx512 = instruction_set() >= InstructionSet::kAvx512;
  EXPECT_EQ(warning(configs::Config::cpu, configs::Train::fp32), "");
  EXPECT_EQ(warning(configs::Config::cpu, configs::Train::bf16) == "", has_avx512);
  EXPECT_NE(warning(configs::Config::cpu, configs::Train::fp16)
                .find(has_avx512 ? "bf16 is the fast choice" : "fp32 is the fast choice"),
            std::string::npos);
  for (const auto precision : {configs::Train::bf16, configs::Train::fp16}) {
    EXPECT_EQ(warning(configs::Config::cuda, precision), "");
  }
}

// With four ranks there are two nodes of two.
TEST_F(TrainRunMpi, InNodesZeroChangesNoBit) {
  const std::string nodes = test_world().size() % 2 == 0 ? "mesh.ranks_per_node=2" : "mesh.data=0";
  EXPECT_EQ(train(config(8, {nodes}), "whole"), Outcome::kDone);
  EXPECT_EQ(train(config(4, {nodes, "train.zero_stage=1"}), "parts"), Outcome::kDone);
  EXPECT_EQ(train(config(8, {nodes}), "parts"), Outcome::kDone);
  EXPECT_EQ(train(config(8), "flat"), Outcome::kDone);
  // In slices of a node, which the nodes have copies of.
  const std::string one_pass = "train.micro_batch=0";
  EXPECT_EQ(train(config(8, {nodes, one_pass}), "one"), Outcome::kDone);
  if (nodes != "mesh.data=0") {
    const std::string inside = "mesh.zero_inside_nodes=true";
    for (const std::string stage : {"1", "2", "3"}) {
      const std::string run = "inside" + stage, zero = "train.zero_stage=" + stage;
      EXPECT_EQ(train(config(4, {nodes, one_pass, inside, zero, "agreement.every=1"}), run),
                Outcome::kDone);
      EXPECT_EQ(train(config(8, {nodes, one_pass}), run), Outcome::kDone);
      if (rank() == 0) {
        EXPECT_EQ(checksums(run), checksums("one")) << stage;
      }
    }
    // Several passes add in another order.
    EXPECT_EQ(train(config(8, {nodes, inside, "train.zero_stage=3"}), "passes"), Outcome::kDone);
    if (rank() == 0) {
      EXPECT_NEAR(figures("passes").back().at("loss").get<double>(),
                  figures("whole").back().at("loss").get<double>(), 1e-4);
    }
  }
  if (rank() != 0) return;
  EXPECT_FALSE(checksums("whole").empty());
  EXPECT_EQ(checksums("parts"), checksums("whole"));
  EXPECT_EQ(figures("parts"), figures("whole"));
  EXPECT_NEAR(figures("whole").back().at("loss").get<double>(),
              figures("flat").back().at("loss").get<double>(), 1e-4);
}

TEST_F(TrainRunMpi, RecomputationMayBeSwitchedWhenARunGoesOnAndChangesNoBit) {
  EXPECT_EQ(train(config(8), "whole"), Outcome::kDone);
  EXPECT_EQ(train(config(4, {"train.recompute=true"}), "parts"), Outcome::kDone);
  EXPECT_EQ(train(config(8), "parts"), Outcome::kDone);
  if (rank() != 0) return;
  EXPECT_FALSE(checksums("whole").empty());
  EXPECT_EQ(checksums("parts"), checksums("whole"));
  EXPECT_EQ(figures("parts"), figures("whole"));
}

// The centroids of routing attention are part of the state of a run. Clusters die and get new
// centroids in a few steps here.
TEST_F(TrainRunMpi, CentroidsGoOnFromACheckpointWithTheSameBits) {
  const std::string routing = "model.attention.0.group.0.mechanism.routing.";
  const auto with_centroids = [&](int steps, std::vector<std::string> settings = {}) {
    settings.insert(settings.end(),
                    {routing + "clusters=40", routing + "window=4", routing + "decay=0.5",
                     routing + "reseed_after=2", routing + "dropout=0.2"});
    return config(steps, settings);
  };
  EXPECT_EQ(train(with_centroids(12), "whole"), Outcome::kDone);
  EXPECT_EQ(train(with_centroids(4, {"train.zero_stage=1", "train.recompute=true"}), "parts"),
            Outcome::kDone);
  EXPECT_EQ(train(with_centroids(12), "parts"), Outcome::kDone);
  if (rank() != 0) return;
  const auto whole = checksums("whole");
  EXPECT_EQ(checksums("parts"), whole);
  EXPECT_EQ(figures("parts"), figures("whole"));
  const std::string name = "blocks.0.attention.groups.0.";
  EXPECT_TRUE(whole.contains(name + "centroids@0"));
  double dead = 0;
  for (const nlohmann::json& line : figures("whole")) {
    dead += line.at(name + "dead_clusters").get<double>();
    EXPECT_GT(line.at(name + "largest_cluster").get<double>(), 1.0 / 40);
  }
  EXPECT_GT(dead, 0);
}

// Exponents of entmax are parameters, and each part of the Sparse Transformer has its own noise.
TEST_F(TrainRunMpi, NormalizersAndPatternsGoOnFromACheckpointWithTheSameBits) {
  for (const std::string name : {"entmax", "top_k", "strided"}) {
    SCOPED_TRACE(name);
    const std::string mechanism =
        name == "strided" ? "sparse_transformer { pattern: strided stride: 4 dropout: 0.2 }"
                          : "dense { normalizer: " + name + " dropout: 0.2 }";
    const auto with_mechanism = [&](int steps, std::vector<std::string> settings = {}) {
      settings.push_back("model.attention.0={ group { mechanism { " + mechanism + " } } }");
      return config(steps, settings);
    };
    EXPECT_EQ(train(with_mechanism(8), name), Outcome::kDone);
    EXPECT_EQ(
        train(with_mechanism(4, {"train.zero_stage=1", "train.recompute=true"}), name + "_parts"),
        Outcome::kDone);
    EXPECT_EQ(train(with_mechanism(8), name + "_parts"), Outcome::kDone);
    if (rank() != 0) continue;
    const auto whole = checksums(name);
    EXPECT_EQ(checksums(name + "_parts"), whole);
    EXPECT_EQ(figures(name + "_parts"), figures(name));
    EXPECT_EQ(whole.contains("blocks.0.attention.groups.0.exponent@0"), name == "entmax");
  }
}

// An epoch is a pass over the training samples. A run that resumes in one goes on at its rate.
TEST_F(TrainRunMpi, SgdWithStepDecayResumesToTheSameBits) {
  const auto config_of = [&](int steps, const std::string& zero) {
    return config(steps, {"train.optimizer={sgd {}}", "train.global_batch=32",
                          "train.micro_batch=0", "model.norm=post", zero,
                          "train.schedule={shape: step_decay warmup_steps: 2 learning_rate: 0.5 "
                          "decay_factor: 0.5 decay_epoch: [1, 3]}",
                          "metrics.every=1"});
  };
  EXPECT_EQ(train(config_of(24, "train.zero_stage=0"), "whole"), Outcome::kDone);
  EXPECT_EQ(train(config_of(9, "train.zero_stage=3"), "parts"), Outcome::kDone);
  EXPECT_EQ(train(config_of(24, "train.zero_stage=1"), "parts"), Outcome::kDone);
  if (rank() != 0) return;
  EXPECT_FALSE(checksums("whole").empty());
  EXPECT_EQ(checksums("parts"), checksums("whole"));
  const std::int64_t samples =
      (Corpus(folder_ / "corpus").stream("train", "tokens").elements() - 1) / 16;
  ASSERT_LT(3 * samples, 23 * 32) << "the test reaches epoch 3";
  for (const nlohmann::json& line : figures("whole")) {
    if (!line.contains("learning_rate")) continue;
    const auto step = line.at("step").get<std::int64_t>();
    const std::int64_t epoch = (step - 1) * 32 / samples;
    const double expected =
        (step < 2 ? 0.25 : 0.5) * (epoch >= 1 ? 0.5 : 1) * (epoch >= 3 ? 0.5 : 1);
    EXPECT_EQ(line.at("learning_rate").get<double>(), expected) << step;
  }
}

// Parameters and optimizer state are kept in fp32, so nothing is lost when a run stops.
TEST_F(TrainRunMpi, Bf16RunsResumeRecomputeAndSliceToTheSameBits) {
  const std::string bf16 = "train.precision=bf16";
  EXPECT_EQ(train(config(8, {bf16}), "whole"), Outcome::kDone);
  EXPECT_EQ(train(config(4, {bf16, "train.zero_stage=1", "train.recompute=true"}), "parts"),
            Outcome::kDone);
  const std::string one_pass = "train.micro_batch=0";
  EXPECT_EQ(train(config(8, {bf16, one_pass}), "one"), Outcome::kDone);
  EXPECT_EQ(
      train(config(4, {bf16, one_pass, "train.zero_stage=3", "train.recompute=true"}), "three"),
      Outcome::kDone);
  EXPECT_EQ(train(config(8, {bf16, one_pass}), "three"), Outcome::kDone);
  if (rank() == 0) {
    EXPECT_EQ(checksums("three"), checksums("one"));
  }
  EXPECT_EQ(train(config(8, {bf16}), "parts"), Outcome::kDone);
  EXPECT_EQ(train(config(8), "fp32"), Outcome::kDone);
  if (rank() != 0) return;
  EXPECT_FALSE(checksums("whole").empty());
  EXPECT_EQ(checksums("parts"), checksums("whole"));
  EXPECT_EQ(figures("parts"), figures("whole"));
  EXPECT_NE(figures("whole").back().at("loss"), figures("fp32").back().at("loss"));
  EXPECT_NEAR(figures("whole").back().at("loss").get<double>(),
              figures("fp32").back().at("loss").get<double>(), 0.02);
}

TEST_F(TrainRunMpi, CountsTheBytesThatArePredicted) {
  const Corpus corpus(folder_ / "corpus");
  const auto targets = corpus.stream("valid", "tokens").elements() - 1;
  for (const int sequences : {0, 2}) {
    const std::string run = "read-" + std::to_string(sequences);
    train(config(4, {"evaluate.sequences=" + std::to_string(sequences)}), run);
    const nlohmann::json last = figures(run).back();
    const std::int64_t tokens = sequences == 0 ? targets : sequences * 16;
    EXPECT_EQ(last.at("tokens"), tokens);
    EXPECT_EQ(last.at("bytes"), tokens);
    EXPECT_NEAR(last.at("bits_per_byte").get<double>(), last.at("loss").get<double>() / std::log(2),
                1e-12);
  }
}

TEST_F(TrainRunMpi, StartingAFinishedRunAgainChangesNothing) {
  train(config(4), "run");
  const auto before = figures("run");
  const auto bits = checksums("run");
  test_world().group().barrier("figures are read");
  EXPECT_EQ(train(config(4), "run"), Outcome::kDone);
  EXPECT_EQ(figures("run"), before);
  EXPECT_EQ(checksums("run"), bits);
}

// Metrics and logs may fail for good from the second line on: the run computes the same.
TEST_F(TrainRunMpi, GoesOnWhereMetricsAndLogsCannotBeWritten) {
  EXPECT_EQ(train(config(12), "whole"), Outcome::kDone);
  std::atomic<int> num_lines = 0;
  set_file_fault_hook([&](const char* call, const std::string& path, std::int64_t) {
    const bool telling =
        path.find("/mute/") != std::string::npos &&
        path.find("/checkpoints/") == std::string::npos &&
        (path.find("metrics.jsonl") != std::string::npos ||
         path.find("tfevents") != std::string::npos || path.find("loss.svg") != std::string::npos ||
         path.find("rank-") != std::string::npos);
    if (!telling || std::string(call) == "open") return 0;
    if (num_lines > 0) return ENOSPC;
    num_lines += std::string(call) == "write" && path.find("metrics.jsonl") != std::string::npos;
    return 0;
  });
  EXPECT_EQ(train(config(12), "mute"), Outcome::kDone);
  set_file_fault_hook({});
  // The run resumes, with a gap in its metrics.
  EXPECT_EQ(train(config(14), "mute"), Outcome::kDone);
  EXPECT_EQ(train(config(14), "whole"), Outcome::kDone);
  if (rank() != 0) return;
  EXPECT_FALSE(checksums("whole").empty());
  EXPECT_EQ(checksums("mute"), checksums("whole"));
  const auto mute = figures("mute");
  ASSERT_EQ(mute.size(), 3u);  // steps 2 and 14, and its evaluation
  EXPECT_EQ(mute[0], figures("whole")[0]);
  EXPECT_EQ(mute[1], figures("whole").end()[-2]);
}

TEST_F(TrainRunMpi, RefusesToResumeWithAnotherModelOrCorpus) {
  train(config(4), "run");
  expect_error([&] { train(config(8, {"model.channels=32"}), "run"); }, ExitCode::kConfig,
               "model.channels: 16 -> 32");
  expect_error([&] { train(config(8, {"data.corpus=" + (folder_ / "other").string()}), "run"); },
               ExitCode::kData, "made with the corpus");
  EXPECT_EQ(train(config(8, {"checkpoint.keep=1"}), "run"),
            Outcome::kDone);  // free fields may change
}

TEST_F(TrainRunMpi, NamesTheRankThatHasAnotherConfiguration) {
  if (test_world().size() == 1) GTEST_SKIP() << "one rank cannot differ from itself";
  const bool last = rank() == test_world().size() - 1;
  const std::string where = "rank " + std::to_string(test_world().size() - 1) + " has a different ";
  expect_error([&] { train(config(last ? 5 : 4), "run"); }, ExitCode::kConfig,
               where + "configuration than rank 0: train.steps: 4 -> 5");
  // One path that means another corpus: a relative path, and ranks in different working
  // directories.
  const fs::path here = fs::current_path();
  if (last) {
    fs::create_directory(folder_ / "elsewhere");
    fs::create_directory_symlink(folder_ / "other", folder_ / "elsewhere" / "corpus");
  }
  fs::current_path(last ? folder_ / "elsewhere" : folder_);
  expect_error([&] { train(config(4, {"data.corpus=corpus"}), "run"); }, ExitCode::kData,
               where + "corpus");
  fs::current_path(here);
}

// Reads a rank's log (rank 0's by default); only the ranks of that run write to it.
class TrainRunTold : public TrainRunMpi {
 protected:
  std::string told(const std::string& run, int of_rank = 0) const {
    const std::string path =
        (folder_ / run / "log" / ("rank-" + std::to_string(of_rank) + ".log")).string();
    test_world().group().barrier("the log is written");
    const std::string text = read_file(path, 1 << 20, ExitCode::kData);
    test_world().group().barrier("the log is read");
    return text;
  }
  static bool has(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
  }
};

TEST_F(TrainRunTold, SaysWhatIsTrueWhereThereIsNothingToDo) {
  train(config(6), "run");
  EXPECT_EQ(train(config(6), "run"), Outcome::kDone);
  EXPECT_TRUE(has(told("run"), "is at step 6, and train.steps = 6: nothing to do")) << told("run");
  EXPECT_EQ(train(config(2), "run"), Outcome::kDone);
  EXPECT_TRUE(has(told("run"), "is at step 6, and train.steps = 2: nothing to do")) << told("run");
}

TEST_F(TrainRunTold, WarnsOfALearningRateThatJumps) {
  const std::vector<std::string> cosine = {"train.schedule.shape=cosine",
                                           "train.schedule.learning_rate=0.002"};
  train(config(20, cosine), "run");
  train(config(20, cosine), "run");
  EXPECT_FALSE(has(told("run"), "learning rate jumps"));
  train(config(40, cosine), "run");  // past the end of the cosine, at its final rate
  EXPECT_TRUE(has(told("run"), "the learning rate jumps: step 21 has 0.001")) << told("run");
  EXPECT_TRUE(has(told("run"),
                  ", and had 0.0001 with the train.schedule and train.steps of the "
                  "checkpoint"))
      << told("run");

  train(config(8), "constant");
  train(config(16), "constant");  // a schedule that does not depend on the run's length
  train(config(20, {"train.schedule.final_learning_rate=0.5"}), "constant");
  EXPECT_FALSE(has(told("constant"), "learning rate jumps")) << told("constant");
  train(config(24, {"train.schedule.learning_rate=0.0005"}), "constant");
  EXPECT_TRUE(has(told("constant"), "step 21 has 0.0005, and had 0.001 with")) << told("constant");
}

TEST_F(TrainRunTold, WarnsOfRanksThatComputeNothing) {
  const int size = test_world().size();
  train(config(2, {"train.global_batch=2"}), "batch");
  train(config(2, {"train.invariant.shards=1"}), "shards");
  train(config(2), "full");
  EXPECT_EQ(has(told("batch"), "ranks compute nothing: train.global_batch = 2; 2 would be"),
            size > 2)
      << told("batch");
  EXPECT_EQ(has(told("shards"),
                "compute nothing: train.global_batch = 8 in train.invariant.shards = 1; 1 would"),
            size > 1)
      << told("shards");
  EXPECT_FALSE(has(told("full"), "compute nothing"));
}

TEST_F(TrainRunTold, EveryRanksLogHasStepsAndTheLastLineSaysItFinished) {
  for (const char* bar : {"", "bar"}) {
    const std::string run = std::string("run") + bar;
    setenv("BIRKHOFF_PROGRESS", bar, /*overwrite=*/1);
    train(config(6), run);
    unsetenv("BIRKHOFF_PROGRESS");
    for (int r = 0; r < test_world().size(); ++r) {
      const std::string text = told(run, r);
      for (const char* step :
           {" info: step 2/6  loss ", " info: step 4/6  ", " info: step 6/6  "}) {
        EXPECT_TRUE(has(text, step)) << r << ": " << text;
      }
    }
    const std::string text = told(run);
    const std::string last = text.substr(text.rfind('\n', text.size() - 2) + 1);
    EXPECT_TRUE(has(last, "finished: 6 steps, train loss ") && has(last, ", valid loss ") &&
                has(last, " tokens/s; checkpoint ") && has(last, "step-00000006"))
        << last;
    EXPECT_TRUE(has(text, test_world().size() == 1 ? ", 1 rank\n" : " ranks\n")) << text;
  }
}

TEST_F(TrainRunTold, DoesNotStartWhereItsFirstSaveCannotFit) {
  set_free_bytes_hook([](const std::string&) { return std::int64_t{5000}; });
  expect_error([&] { train(config(6), "run"); }, ExitCode::kStorage,
               "/run/checkpoints: a checkpoint needs ");
  set_free_bytes_hook({});
  EXPECT_FALSE(has(told("run"), "step 2/6"));
  EXPECT_EQ(train(config(6), "run"), Outcome::kDone);
}

}  // namespace
}  // namespace birkhoff
