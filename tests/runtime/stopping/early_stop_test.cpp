// evaluate.patience: training ends after that many evaluations without a new lowest loss.
#include <gtest/gtest.h>
#include <signal.h>

#include <cmath>
#include <limits>
#include <vector>

#include "runtime/train_state.h"
#include "tests/cluster/base/thread_group.h"
#include "tests/runtime/toy_training.h"

namespace birkhoff {
namespace {

using test::toy_batch;
using test::toy_config;
using test::ToyTraining;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

TEST(EarlyStop, OnlyALowerLossIsNew) {
  configs::Evaluate evaluate;
  evaluate.set_patience(2);
  TrainState state;
  const auto after = [&](double loss) {
    state.evaluated(loss);
    return state.ends_early(evaluate);
  };
  EXPECT_FALSE(after(kNaN));
  EXPECT_FALSE(after(3));
  EXPECT_FALSE(after(3)) << "one evaluation";
  EXPECT_FALSE(after(2.5));
  EXPECT_FALSE(after(2.6));
  EXPECT_TRUE(after(kNaN));
  EXPECT_EQ(state.lowest_loss, 2.5);
  EXPECT_TRUE(std::isnan(*state.held_out_loss));
  state.evaluation_due = true;
  EXPECT_FALSE(state.ends_early(evaluate)) << "the next evaluation decides";
  state.evaluation_due = false;
  state.skipped = 1;
  EXPECT_FALSE(state.ends_early(evaluate)) << "a state that is not saved";
  state.skipped = 0;
  evaluate.set_patience(3);
  EXPECT_FALSE(state.ends_early(evaluate));
  evaluate.set_patience(0);
  EXPECT_FALSE(state.ends_early(evaluate)) << "no patience, no end";
}

TEST(EarlyStop, TheStateIsInTheManifest) {
  TrainState state;
  for (const double loss : {3.0, 2.0, 2.5, kNaN}) state.evaluated(loss);
  CheckpointHeader header;
  write_state(state, header);
  TrainState read;
  read_state(header, header.config(), read);
  EXPECT_EQ(read.lowest_loss, 2.0);
  EXPECT_EQ(read.stale_evaluations, 2);
  TrainState other = state;
  ++other.stale_evaluations;
  EXPECT_NE(text_of(other), text_of(state)) << "ranks compare it";
}

// No loss is below 0. A stop before an evaluation leaves the decision to the resumed run.
TEST(EarlyStop, RanksEndTogetherAndAfterAStop) {
  for (const int stops_at : {0, 2, 6}) {
    run_ranks(3, [&](ProcessGroup& group) {
      configs::Config config = toy_config(100);
      config.mutable_evaluate()->set_every(2);
      config.mutable_evaluate()->set_patience(3);
      ToyTraining training(config, group, at::kFloat);
      training.state.lowest_loss = 0;
      int num_evaluations = 0;
      Evaluator evaluator(training.model, group, {"valid", 3, 1},
                          [&](std::int64_t begin, std::int64_t end) {
                            ++num_evaluations;
                            return toy_batch(begin, end);
                          });
      training.evaluator = &evaluator;
      static std::optional<StopSignals> signals;
      const auto with_signals = [&](const std::function<void()>& action) {
        group.barrier("signals");
        if (group.rank() == 0) signals.emplace();
        group.barrier("signals");
        action();
        group.barrier("signals");
        if (group.rank() == 0) signals.reset();
      };
      if (stops_at > 0) {
        training.before_batch = [&](std::int64_t step) {
          if (step == stops_at && group.rank() == 1) training.request_stop(SIGTERM);
        };
        with_signals([&] { EXPECT_EQ(training.run(*signals), Outcome::kRequeue); });
        training.before_batch = {};
        EXPECT_EQ(training.state.step, stops_at);
        EXPECT_TRUE(training.state.evaluation_due);
      }
      with_signals([&] { EXPECT_EQ(training.run(*signals), Outcome::kDone); });
      EXPECT_EQ(training.state.step, 6) << stops_at;
      EXPECT_EQ(num_evaluations, 3);
    });
  }
}

}  // namespace
}  // namespace birkhoff
