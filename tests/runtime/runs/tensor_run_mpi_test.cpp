// Whole runs on meshes with a tensor axis.
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <iostream>
#include <random>
#include <thread>

#include "tests/runtime/train_run_fixture.h"

namespace birkhoff {
namespace {

class TensorRunMpi : public TrainRunMpi {
 protected:
  // Everything that draws noise or keeps a state, in fp64.
  configs::Config mesh_config(int steps, int tensor, std::vector<std::string> settings = {}) const {
    settings.insert(
        settings.begin(),
        {"train.precision=fp64", "model.heads=8", "mesh.tensor=" + std::to_string(tensor),
         "model.attention.0={ group { heads: 4 mechanism { sinkhorn { block: 4 "
         "gumbel_noise: true dropout: 0.1 } } } group { mechanism { routing { "
         "clusters: 4 dropout: 0.1 reseed_after: 2 } } } }"});
    return config(steps, settings);
  }
  static int size() { return test_world().size(); }
};

TEST_F(TensorRunMpi, AMeshTrainsLikeDataParallelRanks) {
  EXPECT_EQ(train(mesh_config(8, 1), "data"), Outcome::kDone);
  for (int tensor = 2; tensor <= size(); tensor *= 2) {
    const std::string run = "tensor-" + std::to_string(tensor);
    EXPECT_EQ(train(mesh_config(8, tensor, {"agreement.every=1"}), run), Outcome::kDone);
    expect_same_figures(run, "data");
    EXPECT_EQ(train(mesh_config(8, tensor, {"train.zero_stage=1"}), run + "-zero"), Outcome::kDone);
    expect_same_figures(run + "-zero", "data");
  }
}

TEST_F(TensorRunMpi, ARunGoesOnOnAnotherMesh) {
  EXPECT_EQ(train(mesh_config(12, 1), "whole"), Outcome::kDone);
  EXPECT_EQ(train(mesh_config(4, size()), "parts"), Outcome::kDone);
  EXPECT_EQ(train(mesh_config(8, 1, {"train.zero_stage=1"}), "parts"), Outcome::kDone);
  EXPECT_EQ(train(mesh_config(12, std::min(2, size()), {"train.zero_stage=1"}), "parts"),
            Outcome::kDone);
  expect_same_figures("parts", "whole");
}

TEST_F(TensorRunMpi, AnInterruptedRunEndsWithTheSameBits) {
  EXPECT_EQ(train(mesh_config(8, size()), "whole"), Outcome::kDone);
  EXPECT_EQ(train(mesh_config(4, size(), {"train.zero_stage=1", "train.recompute=true"}), "parts"),
            Outcome::kDone);
  EXPECT_EQ(train(mesh_config(8, size()), "parts"), Outcome::kDone);
  if (rank() != 0) return;
  EXPECT_EQ(figures("parts"), figures("whole"));
  EXPECT_EQ(checksums("parts"), checksums("whole"));
}

// Only one rank sees a signal, between any two operations of a step: all end, with a checkpoint of
// the same step. BIRKHOFF_MESH_STOPS sets the number of trials.
TEST_F(TensorRunMpi, ASignalThatOneRankSeesFirstStopsAll) {
  const int tensor = std::min(2, size());
  const char* const set = std::getenv("BIRKHOFF_MESH_STOPS");
  const int num_trials = set != nullptr ? std::atoi(set) : 20;
  for (int trial = 0; trial < num_trials; ++trial) {
    std::mt19937 random(static_cast<unsigned>(trial));
    const int who = static_cast<int>(random()) & (size() - 1);
    const auto delay = std::chrono::microseconds(random() % 60000);
    const std::string run = "stop-" + std::to_string(trial);
    {
      const StopSignals signals;
      std::thread sender([&] {
        if (rank() != who) return;
        std::this_thread::sleep_for(delay);
        kill(getpid(), SIGTERM);
      });
      const Outcome outcome = train(
          mesh_config(1000000, tensor, {"evaluate.every=5", "checkpoint.every=0"}), run, signals);
      sender.join();
      EXPECT_EQ(outcome, Outcome::kRequeue);
    }
    // One more step ends the run, from the checkpoint of the stop if there is one.
    std::string newest = "0";
    if (rank() == 0) {
      const auto checkpoint = find_newest_checkpoint(folder_ / run / "checkpoints", false);
      if (checkpoint) newest = std::to_string(checkpoint->manifest.step());
    }
    newest = test_world().group().broadcast_bytes(newest, 0, "newest checkpoint");
    EXPECT_EQ(train(mesh_config(std::stoi(newest) + 1, tensor), run), Outcome::kDone);
  }
  if (rank() != 0) return;
  std::cout << "signals on a mesh: tried " << num_trials << ", lost "
            << (HasFailure() ? "some" : "0") << '\n';
}

TEST_F(TensorRunMpi, ValuesThatAreNotFiniteEndTheRunOnAllRanks) {
  expect_error(
      [&] {
        train(mesh_config(40, size(),
                          {"train.schedule.learning_rate=1e38", "train.non_finite=stop",
                           "train.schedule.warmup_steps=0"}),
              "diverges");
      },
      ExitCode::kNumerical, "not finite");
}

}  // namespace
}  // namespace birkhoff
