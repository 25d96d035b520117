// Training over MPI: the number of ranks changes only the rounding, and repeated runs are
// identical.
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <cmath>
#include <optional>
#include <thread>

#include "cluster/mesh.h"
#include "runtime/trainer.h"
#include "tests/cluster/mpi_test_main.h"
#include "tests/runtime/optimizers/gathered_state.h"

namespace birkhoff {
namespace {

using test::gathered_state;
using test::toy_config;
using test::ToyTraining;

double largest_relative_difference(const at::Tensor& a, const at::Tensor& b) {
  return ((a - b).abs().max() / b.abs().max()).item<double>();
}

TEST(TrainerMpi, EqualsOneRank) {
  const StopSignals signals;
  const auto single = make_single_group();
  for (const auto& [dtype, steps, tolerance] :
       {std::tuple(at::kDouble, 50, 1e-10), std::tuple(at::kFloat, 5, 1e-6)}) {
    ToyTraining reference(toy_config(steps), *single, dtype);
    reference.run(signals);
    ToyTraining training(toy_config(steps), test_world().group(), dtype);
    EXPECT_EQ(training.run(signals), Outcome::kDone);
    EXPECT_LT(largest_relative_difference(training.parameters(), reference.parameters()), tolerance)
        << dtype;
    EXPECT_LT(std::abs(training.loss() / reference.loss() - 1), tolerance) << dtype;
    EXPECT_EQ(training.state.tokens, reference.state.tokens);
  }
}

TEST(TrainerMpi, TwoRunsHaveTheSameBits) {
  const StopSignals signals;
  ToyTraining first(toy_config(20), test_world().group(), at::kFloat);
  ToyTraining second(toy_config(20), test_world().group(), at::kFloat);
  first.run(signals);
  second.run(signals);
  EXPECT_TRUE(at::equal(first.parameters(), second.parameters()));
}

TEST(TrainerMpi, ZeroChangesNoBit) {
  const StopSignals signals;
  for (const int shards : {0, 4}) {
    configs::Config config = toy_config(20);
    config.mutable_train()->mutable_invariant()->set_shards(shards);
    ToyTraining plain(config, test_world().group(), at::kFloat);
    config.mutable_train()->set_zero_stage(true);
    ToyTraining zero(config, test_world().group(), at::kFloat);
    plain.run(signals);
    zero.run(signals);
    EXPECT_EQ(gathered_state(zero, test_world().group()),
              gathered_state(plain, test_world().group()));
    EXPECT_EQ(zero.loss(), plain.loss());
  }
}

TEST(TrainerMpi, ASignalToOneRankStopsAllAfterTheSameStep) {
  const StopSignals signals;
  ToyTraining training(toy_config(20), test_world().group(), at::kFloat);
  training.before_batch = [&](std::int64_t) {
    if (test_world().rank() == test_world().size() - 1) training.request_stop(SIGTERM);
  };
  EXPECT_EQ(training.run(signals), Outcome::kRequeue);
  EXPECT_EQ(training.state.step, 1);
}

TEST(TrainerMpi, AStepThatOneRankAbandonsIsDoneByNone) {
  configs::Config config = toy_config(5);
  config.mutable_train()->set_micro_batch(1);
  ASSERT_LE(2 * test_world().size(), config.train().global_batch()) << "two micro-batches a rank";
  ToyTraining training(config, test_world().group(), at::kFloat),
      whole(config, test_world().group(), at::kFloat);
  std::optional<StopSignals> signals;
  signals.emplace();
  whole.run(*signals);
  training.before_batch = [&](std::int64_t step) {
    if (step == 3 && test_world().rank() == test_world().size() - 1) {
      training.request_stop(SIGTERM);
    }
  };
  training.model.before_pass = [&] {
    if (signals->received() != 0) std::this_thread::sleep_for(std::chrono::milliseconds(2100));
  };
  EXPECT_EQ(training.run(*signals), Outcome::kRequeue);
  EXPECT_EQ(training.state.step, 2);
  signals.reset();
  signals.emplace();
  training.before_batch = {};
  EXPECT_EQ(training.run(*signals), Outcome::kDone);
  EXPECT_TRUE(training.parameters().equal(whole.parameters()));
}

// A mesh with a second axis: each column trains a replica of its own. What happens to one rank of a
// column is decided by all ranks of the world.
class TrainerMpiMesh : public testing::Test {
 protected:
  static configs::Mesh columns() {
    configs::Mesh mesh;
    mesh.set_tensor(2);
    return mesh;
  }
  void SetUp() override {
    if (test_world().size() % 2 != 0) GTEST_SKIP() << "needs an even number of ranks";
  }
  static bool in_second_column() { return test_world().rank() % 2 == 1; }
};

TEST_F(TrainerMpiMesh, ASignalToOneRankStopsAllColumns) {
  const StopSignals signals;
  Mesh mesh(test_world(), columns(), at::kCPU);
  ToyTraining training(toy_config(20), mesh.data(), at::kFloat);
  training.world = &test_world().group();
  training.before_batch = [&](std::int64_t) {
    if (test_world().rank() == test_world().size() - 1) training.request_stop(SIGTERM);
  };
  EXPECT_EQ(training.run(signals), Outcome::kRequeue);
  EXPECT_EQ(training.state.step, 1);
}

TEST_F(TrainerMpiMesh, AllColumnsSkipWhatIsNotFiniteInOne) {
  const StopSignals signals;
  Mesh mesh(test_world(), columns(), at::kCPU);
  ToyTraining all_finite(toy_config(4), mesh.data(), at::kFloat);
  all_finite.world = &test_world().group();
  all_finite.run(signals);
  for (const bool only_gradients : {false, true}) {
    ToyTraining training(toy_config(4), mesh.data(), at::kFloat);
    training.world = &test_world().group();
    if (in_second_column() && only_gradients) {
      training.model.spoil_gradients(/*step=*/2, /*sample=*/12);
    } else if (in_second_column()) {
      training.model.spoil(/*step=*/2, /*sample=*/12);
    }
    EXPECT_EQ(training.run(signals), Outcome::kDone);
    EXPECT_LT(training.state.tokens, all_finite.state.tokens);
    const at::Tensor parameters = training.parameters(), of_rank_0 = parameters.clone();
    test_world().group().broadcast(of_rank_0, 0, "parameters");
    EXPECT_TRUE(at::equal(parameters, of_rank_0));
  }
}

}  // namespace
}  // namespace birkhoff
