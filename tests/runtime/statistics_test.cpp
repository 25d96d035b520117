// Statistics and figures of a run: sums over micro-batches and ranks, applied once a step. The
// mechanism is tests/runtime/running_mean.h; the other tests of the runtime train with it, too.
#include <gtest/gtest.h>
#include <signal.h>

#include <cstdlib>
#include <map>
#include <optional>

#include "runtime/agreement.h"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/evaluator.h"
#include "runtime/reporting/reporter.h"
#include "runtime/training_step.h"
#include "tests/cluster/base/thread_group.h"
#include "tests/runtime/checkpoint/checkpoint_fixture.h"
#include "tests/runtime/optimizers/gathered_state.h"

namespace birkhoff {
namespace {

using test::gathered_state;
using test::sum_named;
using test::toy_batch;
using test::toy_config;
using test::ToyTraining;

at::Tensor statistic_of(ToyTraining& training) {
  return training.model.parameters().statistics().at(0).value;
}

// The statistic after a step on the whole global batch at once.
at::Tensor expected_after_a_step(const configs::Config& config, at::ScalarType dtype) {
  test::ToyModel model(dtype);
  const Batch batch = toy_batch(0, config.train().global_batch());
  const NoiseKey noise{config.train().seed(), at::full({1}, 1, at::kLong), 0, batch.sample_ids_B};
  return test::RunningMean::next_mean(model.parameters().statistics().at(0).value,
                                      sum_named("attention.mean", model.loss_sums(batch, noise)));
}

configs::Config config_of(std::int64_t steps, int micro_batch, int shards = 0) {
  configs::Config config = toy_config(steps);
  config.mutable_train()->set_micro_batch(micro_batch);
  config.mutable_train()->mutable_invariant()->set_shards(shards);
  return config;
}

double relative_difference(const at::Tensor& a, const at::Tensor& b) {
  return ((a - b).norm() / b.norm()).item<double>();
}

// 3 ranks of 2 micro-batches of 2 sequences, and other divisions of the same 12.
TEST(Statistics, AreSummedOverMicroBatchesAndRanks) {
  const StopSignals signals;
  const at::Tensor expected = expected_after_a_step(config_of(1, 0), at::kDouble);
  for (const int shards : {0, 6}) {
    for (const auto& [ranks, micro_batch] : {std::pair(3, 2), {1, 0}, {1, 5}, {2, 3}, {4, 1}}) {
      run_ranks(ranks, [&, micro = micro_batch](ProcessGroup& group) {
        ToyTraining training(config_of(1, micro, shards), group, at::kDouble);
        const at::Tensor before = statistic_of(training).clone();
        training.run(signals);
        EXPECT_LT(relative_difference(statistic_of(training), expected), 1e-14);
        EXPECT_GT(relative_difference(before, expected), 1e-3) << "the step changes it";
      });
    }
  }
}

TEST(Statistics, VirtualShardsGiveTheSameBitsOnAnyNumberOfRanks) {
  const StopSignals signals;
  std::map<std::string, std::string> expected;
  for (const int ranks : {1, 2, 3}) {
    run_ranks(ranks, [&](ProcessGroup& group) {
      ToyTraining training(config_of(5, 1, 6), group, at::kFloat);
      training.run(signals);
      const std::map<std::string, std::string> state = gathered_state(training, group);
      ASSERT_TRUE(state.contains("attention.mean"));
      if (ranks == 1) expected = state;
      EXPECT_EQ(state, expected) << ranks << " ranks, rank " << group.rank();
    });
  }
}

TEST(Statistics, StayAsTheyAreInASkippedStep) {
  const StopSignals signals;
  testing::internal::CaptureStderr();  // the warning
  run_ranks(3, [&](ProcessGroup& group) {
    ToyTraining training(config_of(4, 2), group, at::kFloat);
    training.model.spoil(/*step=*/3, /*sample=*/24 + 7);  // on one rank
    std::vector<at::Tensor> values;                       // before each step, then at the end
    training.before_batch = [&](std::int64_t) { values.push_back(statistic_of(training).clone()); };
    training.run(signals);
    values.push_back(statistic_of(training));
    ASSERT_EQ(values.size(), 5u);
    for (std::size_t step = 1; step <= 4; ++step) {
      EXPECT_EQ(at::equal(values[step], values[step - 1]), step == 3) << "step " << step;
    }
  });
  EXPECT_NE(testing::internal::GetCapturedStderr().find("step 3: not finite: loss of rank 1"),
            std::string::npos);
}

TEST(Statistics, RecomputationCountsThemOnce) {
  const StopSignals signals;
  run_ranks(3, [&](ProcessGroup& group) {
    ToyTraining plain(config_of(3, 2), group, at::kFloat);
    ToyTraining recomputing(config_of(3, 2), group, at::kFloat);
    recomputing.model.recompute = true;
    plain.run(signals);
    recomputing.run(signals);
    EXPECT_EQ(gathered_state(recomputing, group), gathered_state(plain, group));
  });
}

// Trains on `ranks` threads in `folder` from its newest checkpoint, and saves after each step. Ends
// the process with SIGKILL after `steps`, if that is not the end.
std::map<std::string, std::string> train_in(const std::filesystem::path& folder, int ranks,
                                            std::int64_t last_step, std::int64_t killed_after) {
  const StopSignals signals;
  configs::Config config = config_of(last_step, 2, 6);
  config.mutable_checkpoint()->set_every(1);
  const auto resume = find_newest_checkpoint(folder, false);
  std::map<std::string, std::string> state;
  run_ranks(ranks, [&](ProcessGroup& group) {
    ToyTraining training(config, group, at::kFloat);
    std::vector<TensorPart> parts =
        training_parts(training.model, training.buckets, *training.optimizer, group.size());
    if (resume) {
      load_checkpoint(*resume, parts);
      read_state(resume->manifest, resume->manifest.config(), training.state);
    }
    CheckpointHeader header = make_header(0);
    *header.mutable_config() = config;
    CheckpointWriter writer(folder, 2, {}, group);
    const Reporter reporter;
    RunCheckpoints checkpoints(&writer, group, header, parts, std::nullopt, nullptr, reporter);
    training.checkpoints = &checkpoints;
    training.before_batch = [&](std::int64_t step) {
      if (step > killed_after && group.rank() == 0) raise(SIGKILL);
    };
    training.run(signals);
    const std::map<std::string, std::string> mine = gathered_state(training, group);
    if (group.rank() == 0) state = mine;
  });
  return state;
}

TEST(StatisticsDeathTest, AKilledRunGoesOnWithTheSameBitsOnOtherRanks) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  // The child runs this test from its start, in the folder of its parent, and is killed before it
  // could remove one of its own.
  const char* variable = "BIRKHOFF_TEST_KILLED_FOLDER";
  std::optional<TestFolder> whole, killed;
  std::map<std::string, std::string> expected;
  if (std::getenv(variable) == nullptr) {
    expected = train_in(whole.emplace(), 3, 8, 100);
    ::setenv(variable, killed.emplace().path().c_str(), 1);
  }
  const std::string folder = std::getenv(variable);
  EXPECT_EXIT(train_in(folder, 3, 8, 4), testing::KilledBySignal(SIGKILL), "");
  ASSERT_TRUE(find_newest_checkpoint(folder, false));
  EXPECT_EXIT(train_in(folder, 2, 8, 6), testing::KilledBySignal(SIGKILL), "");
  EXPECT_EQ(train_in(folder, 1, 8, 100), expected);
  ::unsetenv(variable);
}

TEST(Statistics, AreInTheFilesOfTheModel) {
  const StopSignals signals;
  const TestFolder folder;
  run_ranks(3, [&](ProcessGroup& group) {
    ToyTraining training(config_of(2, 0), group, at::kFloat);
    training.run(signals);
    CheckpointWriter writer(folder, 1, {}, group);
    writer.save(make_header(2),
                training_parts(training.model, training.buckets, *training.optimizer, 3));
    writer.finish();
    // What eval and sample load.
    ToyTraining fresh(config_of(2, 0), group, at::kFloat);
    std::vector<TensorPart> parts = model_tensors(fresh.model);
    load_model_tensors(find_newest_checkpoint(folder, false).value(), parts);
    EXPECT_TRUE(at::equal(fresh.parameters(), training.parameters()));
  });
  const auto checkpoint = find_newest_checkpoint(folder, false);
  ASSERT_TRUE(checkpoint);
  for (const auto& tensor : checkpoint->manifest.tensor()) {
    if (tensor.name() != "attention.mean") continue;
    EXPECT_EQ(tensor.kind(), "statistic");
    EXPECT_TRUE(tensor.file().starts_with("model-"));
    const std::string index = read_bytes(checkpoint->path / "model.safetensors.index.json");
    EXPECT_NE(index.find("\"attention.mean\""), std::string::npos) << index;
    return;
  }
  ADD_FAILURE() << "the checkpoint has no statistic";
}

TEST(Statistics, RanksCompareThem) {
  run_ranks(3, [&](ProcessGroup& group) {
    ToyTraining training(config_of(2, 0), group, at::kFloat);
    Agreement agreement(group, group,
                        training_parts(training.model, training.buckets, *training.optimizer, 3),
                        "here");
    EXPECT_EQ(agreement.find_difference(training.state), "");
    if (group.rank() == 2) statistic_of(training)[0][0] += 1;
    EXPECT_NE(agreement.find_difference(training.state).find("attention.mean"), std::string::npos);
  });
}

// Sums over samples per sums over samples, over ranks and micro-batches.
TEST(Figures, AreThoseOfTheWholeBatch) {
  configs::Config config = config_of(1, 2);
  test::ToyModel model(at::kDouble);
  const Batch batch = toy_batch(0, config.train().global_batch());
  const NoiseKey noise{config.train().seed(), at::full({1}, 1, at::kLong), 0, batch.sample_ids_B};
  const LossSums sums = model.loss_sums(batch, noise);
  const auto named = [&](const std::string& name) {
    return sum_named("attention." + name, sums).item<double>();
  };
  for (const int ranks : {1, 3}) {
    run_ranks(ranks, [&](ProcessGroup& group) {
      ToyTraining training(config, group, at::kDouble);
      TrainingStep step(config.train(), training.model, group, group, training.buckets,
                        *training.optimizer);
      const FigureValues figures = step.sum_gradients(training.next_batch(), 1, 1).figures;
      ASSERT_EQ(figures.size(), 2u);
      EXPECT_EQ(figures[0].first, "attention.auxiliary_loss");
      EXPECT_NEAR(figures[0].second, named("auxiliary_loss") / sums.count.item<double>(), 1e-13);
      EXPECT_EQ(figures[1].first, "attention.square_distance");
      EXPECT_NEAR(figures[1].second, named("square_distance") / named("keys"), 1e-13);
    });
  }
}

TEST(Figures, OfAnEvaluationAreTheSameOnAnyNumberOfRanks) {
  FigureValues expected;
  for (const int ranks : {1, 2, 3}) {
    run_ranks(ranks, [&](ProcessGroup& group) {
      ToyTraining training(config_of(1, 0), group, at::kFloat);
      Evaluator evaluator(
          training.model, group, {"valid", 10, 3},
          [](std::int64_t begin, std::int64_t end) { return toy_batch(begin, end); });
      const Evaluation evaluation = *evaluator.run([] { return false; });
      ASSERT_EQ(evaluation.figures.size(), 2u);
      EXPECT_GT(evaluation.figures[1].second, 0);
      if (ranks == 1) expected = evaluation.figures;
      EXPECT_EQ(evaluation.figures, expected);
    });
  }
}

}  // namespace
}  // namespace birkhoff
