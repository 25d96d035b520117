// The real program with device: cuda: one rank, and several that may share a GPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <cmath>

#include "tests/launcher/processes/train_process_fixture.h"

namespace birkhoff {
namespace {

using Settings = std::vector<std::string>;

class TrainOnGpu : public TrainProcess {
 protected:
  static Settings arguments(const std::string& device, const Settings& settings) {
    Settings result;
    for (const std::string& setting : {std::string("train.steps=40"), "device=" + device}) {
      result.insert(result.end(), {"--set", setting});
    }
    for (const std::string& setting : settings) result.insert(result.end(), {"--set", setting});
    return result;
  }
  static Finished train_on(const std::string& device, const std::string& name,
                           const Settings& settings = {}) {
    const Finished finished = run_child(train(name, arguments(device, settings)));
    EXPECT_EQ(finished.code, 0) << finished.err;
    return finished;
  }
  // Compares the losses of both devices for the same run, step by step.
  static void expect_like_the_cpu(const std::string& name, const Settings& settings,
                                  double tolerance) {
    train_on("cpu", name + "_cpu", settings);
    train_on("cuda", name + "_cuda", settings);
    const MetricsLines cpu = lines_of_metrics(run(name + "_cpu"));
    const MetricsLines cuda = lines_of_metrics(run(name + "_cuda"));
    ASSERT_EQ(cuda.losses.size(), cpu.losses.size());
    ASSERT_EQ(cpu.losses.size(), 40u);
    for (std::size_t i = 0; i < cpu.losses.size(); ++i) {
      EXPECT_NEAR(cuda.losses[i], cpu.losses[i], tolerance) << name << ", step " << i + 1;
    }
  }
};

TEST_F(TrainOnGpu, LossesAreTheCpus) {
  expect_like_the_cpu("plain", {}, 1e-3);
  expect_like_the_cpu("micro", {"train.micro_batch=2"}, 1e-3);
  expect_like_the_cpu("invariant", {"train.invariant.shards=4"}, 1e-3);
  expect_like_the_cpu("recompute", {"train.recompute=true"}, 1e-3);
  expect_like_the_cpu("dropout", {"model.dropout.residual=0.1"}, 1e-3);
  expect_like_the_cpu("adafactor", {"train.optimizer.adafactor.clip_update=1"}, 1e-3);
  expect_like_the_cpu("sgd", {"train.optimizer.sgd.momentum=0.9"}, 1e-3);
  expect_like_the_cpu("post-norm", {"model.norm=post", "model.head_channels=24"}, 1e-3);
  expect_like_the_cpu("bf16", {"train.precision=bf16"}, 3e-2);
}

TEST_F(TrainOnGpu, RepeatsAndResumesWithTheSameBits) {
  train_on("cuda", "first");
  train_on("cuda", "second");
  EXPECT_EQ(lines_of_metrics(run("second")).figures, lines_of_metrics(run("first")).figures);
  EXPECT_TRUE(final_tensors(run("second")) == final_tensors(run("first")));

  Child child(train("stopped", arguments("cuda", {})));
  ASSERT_TRUE(wait_for_step(child, run("stopped"), 5));
  child.signal(SIGTERM);
  EXPECT_THAT(child.finish().code, testing::AnyOf(75, 0));
  train_on("cuda", "stopped");
  EXPECT_EQ(lines_of_metrics(run("stopped")).figures, lines_of_metrics(run("first")).figures);
  EXPECT_TRUE(final_tensors(run("stopped")) == final_tensors(run("first")));
}

// train.cuda_graph: replays whole steps, with evaluations and checkpoints between them.
TEST_F(TrainOnGpu, RecordedStepsHaveTheSameBits) {
  const std::vector<Settings> cases{
      {"model.dropout.residual=0.1", "train.micro_batch=2"},
      {"model.dropout.embedding=0.1", "train.recompute=true", "train.precision=bf16"},
      {"train.precision=fp16"},
  };
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const std::string plain = "plain_" + std::to_string(i);
    const std::string recorded = "recorded_" + std::to_string(i);
    train_on("cuda", plain, cases[i]);
    Settings settings = cases[i];
    settings.push_back("train.cuda_graph=true");
    if (i == 0) {  // stops and resumes, with its own recording
      Child child(train(recorded, arguments("cuda", settings)));
      ASSERT_TRUE(wait_for_step(child, run(recorded), 8));
      child.signal(SIGTERM);
      EXPECT_THAT(child.finish().code, testing::AnyOf(75, 0));
    }
    train_on("cuda", recorded, settings);
    EXPECT_EQ(lines_of_metrics(run(recorded)).figures, lines_of_metrics(run(plain)).figures)
        << recorded;
    EXPECT_TRUE(final_tensors(run(recorded)) == final_tensors(run(plain))) << recorded;
  }
}

TEST_F(TrainOnGpu, WhatItSavedIsReadWithoutOne) {
  const Finished trained = train_on("cuda", "saved");
  EXPECT_THAT(trained.err, testing::HasSubstr("of tensors on the GPU"));
  std::vector<std::string> texts;
  for (const char* device : {"cpu", "cuda"}) {
    const Finished evaluated =
        run_child({.line = birkhoff_line({"eval", run("saved").string(), "--device", device})});
    ASSERT_EQ(evaluated.code, 0) << evaluated.err;
    const Finished sampled = run_child(
        {.line = birkhoff_line({"sample", run("saved").string(), "--prompt", "the ", "--tokens",
                                "20", "--temperature", "0", "--device", device})});
    ASSERT_EQ(sampled.code, 0) << sampled.err;
    texts.push_back(sampled.out);
  }
  EXPECT_EQ(texts[0], texts[1]);
  // It resumes on the CPU.
  const Finished resumed =
      run_child(train("saved", {"--set", "train.steps=44", "--set", "device=cpu"}));
  EXPECT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_EQ(last_step(run("saved")), 44);
}

// Ranks over NCCL. If there are fewer GPUs than ranks, ranks share them; this tests only the
// function.
class RanksOnGpu : public TrainOnGpu {
 protected:
  void SetUp() override { setenv("BIRKHOFF_SHARE_GPUS", "1", /*overwrite=*/1); }

  static std::vector<std::string> on_ranks(int ranks, const Settings& settings) {
    std::vector<std::string> line = arguments("cuda", settings);
    line.insert(line.begin(), {"--ranks", std::to_string(ranks)});
    return line;
  }
  static void train_on_ranks(int ranks, const std::string& name, const Settings& settings) {
    const Finished finished = run_child(train(name, on_ranks(ranks, settings)));
    ASSERT_EQ(finished.code, 0) << finished.err;
  }
  static void expect_same(const std::string& a, const std::string& b) {
    EXPECT_EQ(lines_of_metrics(run(a)).figures, lines_of_metrics(run(b)).figures) << a << ", " << b;
    EXPECT_TRUE(final_tensors(run(a)) == final_tensors(run(b))) << a << ", " << b;
  }
  // Two ranks that do not end by themselves.
  static Command endless(const std::string& name) {
    return train(name, on_ranks(2, {"train.steps=1000000", "checkpoint.every=5",
                                    "watchdog.seconds=" + std::to_string(kWatchdogSeconds)}));
  }

  static constexpr int kWatchdogSeconds = 2;
  // On CPUs it is 5. Here the driver destroys contexts with spinning kernels while other tests run.
  static constexpr int kMaxSeconds = 15;
};

TEST_F(RanksOnGpu, AnyNumberOfThemHasTheSameBits) {
  const Settings invariant{"train.invariant.shards=4", "train.global_batch=8"};
  train_on_ranks(1, "invariant_1", invariant);
  for (const int ranks : {2, 4}) {
    const std::string name = "invariant_" + std::to_string(ranks);
    train_on_ranks(ranks, name, invariant);
    expect_same(name, "invariant_1");
  }
}

TEST_F(RanksOnGpu, RepeatWithTheSameBitsAndWithZero) {
  const Settings settings{"train.precision=bf16", "train.bucket_elements=2000"};
  train_on_ranks(2, "ranks", settings);
  train_on_ranks(2, "ranks_again", settings);
  expect_same("ranks_again", "ranks");
  Settings zero = settings;
  zero.push_back("train.zero_stage=1");
  train_on_ranks(2, "ranks_zero", zero);
  expect_same("ranks_zero", "ranks");
}

TEST_F(RanksOnGpu, AKilledOneEndsTheJobWhichGoesOn) {
  Child child(endless("killed"));
  ASSERT_TRUE(wait_for_step(child, run("killed"), 20)) << child.finish().err;
  const auto start = std::chrono::steady_clock::now();
  signal_rank(run("killed"), 1, SIGKILL);
  const Finished finished = child.finish(std::chrono::seconds(60));
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
  EXPECT_EQ(finished.code, 7) << finished.err;
  EXPECT_TRUE(wait_until_none(run("killed"), std::chrono::seconds(5)));
  EXPECT_LT(taken.count(), kMaxSeconds);
  const int step = last_step(run("killed"));
  train_on_ranks(2, "killed", {"train.steps=" + std::to_string(step + 5)});
  EXPECT_EQ(last_step(run("killed")), step + 5);
}

TEST_F(RanksOnGpu, AStoppedOneIsNamedAndTheJobEnds) {
  Child child(endless("stopped"));
  ASSERT_TRUE(wait_for_step(child, run("stopped"), 20)) << child.finish().err;
  const auto start = std::chrono::steady_clock::now();
  signal_rank(run("stopped"), 1, SIGSTOP);
  const Finished finished = child.finish(std::chrono::seconds(60));
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
  EXPECT_EQ(finished.code, 8) << finished.err;
  EXPECT_THAT(finished.err, testing::HasSubstr("birkhoff: rank 1 on "));
  EXPECT_TRUE(wait_until_none(run("stopped"), std::chrono::seconds(5)));
  EXPECT_LT(taken.count(), kWatchdogSeconds + kMaxSeconds);
}

}  // namespace
}  // namespace birkhoff
