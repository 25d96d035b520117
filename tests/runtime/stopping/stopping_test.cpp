// Requests to stop: they end the run, leave the rest to the resumed run, and change no bit.
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <functional>
#include <optional>
#include <thread>
#include <utility>

#include "runtime/stopping/stop_request.h"
#include "tests/cluster/base/thread_group.h"
#include "tests/runtime/deliver.h"
#include "tests/runtime/toy_training.h"

namespace birkhoff {
namespace {

using test::toy_batch;
using test::toy_config;
using test::ToyTraining;

// A run that is stopped where an evaluation is due leaves it to the resumed run.
TEST(Trainer, AnEvaluationThatAStopSkipsIsMadeUpFor) {
  const auto group = make_single_group();
  configs::Config config = toy_config(6);
  config.mutable_evaluate()->set_every(2);
  ToyTraining training(config, *group, at::kFloat);
  int num_evaluations = 0;
  Evaluator evaluator(training.model, *group, {"valid", 4, 4},
                      [&](std::int64_t begin, std::int64_t end) {
                        ++num_evaluations;
                        return toy_batch(begin, end);
                      });
  training.evaluator = &evaluator;
  training.before_batch = [&](std::int64_t) { training.request_stop(SIGTERM); };
  for (const int step : {1, 2}) {
    const StopSignals signals;
    EXPECT_EQ(training.run(signals), Outcome::kRequeue);
    EXPECT_EQ(training.state.step, step);
    EXPECT_EQ(training.state.evaluation_due, step == 2);
  }
  training.before_batch = {};
  EXPECT_TRUE(training.state.evaluation_due);
  EXPECT_EQ(num_evaluations, 0);
  const StopSignals signals;
  EXPECT_EQ(training.run(signals), Outcome::kDone);
  EXPECT_EQ(num_evaluations, 3);  // of steps 2, 4 and 6
}

// A request to one rank ends an evaluation at once; the resumed run makes it from its start.
TEST(Trainer, AStopEndsAnEvaluation) {
  constexpr std::int64_t kWindows = 1000;
  run_ranks(3, [&](ProcessGroup& group) {
    configs::Config config = toy_config(2);
    config.mutable_evaluate()->set_every(1);
    ToyTraining training(config, group, at::kFloat);
    std::int64_t num_read = 0;
    std::function<void()> at_read;
    Evaluator evaluator(training.model, group, {"valid", kWindows, 1},
                        [&](std::int64_t begin, std::int64_t end) {
                          ++num_read;
                          if (at_read) at_read();
                          return toy_batch(begin, end);
                        });
    training.evaluator = &evaluator;
    static std::optional<StopSignals> signals;
    if (group.rank() == 0) signals.emplace();
    group.barrier("signals");
    at_read = [&] {
      if (group.rank() == 2 && num_read == 5) training.request_stop(SIGUSR1);
    };
    EXPECT_EQ(training.run(*signals), Outcome::kRequeue);
    EXPECT_EQ(training.state.step, 1);
    EXPECT_TRUE(training.state.evaluation_due);
    EXPECT_FALSE(training.state.held_out_loss);
    EXPECT_LT(num_read, 20);

    group.barrier("stopped");
    if (group.rank() == 0) signals.reset(), signals.emplace();
    group.barrier("signals");
    at_read = {};
    num_read = 0;
    EXPECT_EQ(training.run(*signals), Outcome::kDone);
    EXPECT_EQ(num_read, 2 * (kWindows / 3 + (group.rank() == 0)));
    group.barrier("done");
    if (group.rank() == 0) signals.reset();
  });
}

TEST(Trainer, AStopBeforeTheFirstStepDoesNone) {
  const auto group = make_single_group();
  ToyTraining training(toy_config(6), *group, at::kFloat);
  training.before_batch = [](std::int64_t) { FAIL() << "no batch is needed"; };
  const StopSignals signals;
  test::deliver(signals, SIGTERM);
  EXPECT_EQ(training.run(signals), Outcome::kRequeue);
  EXPECT_EQ(training.state.step, 0);
}

// A step that takes longer than a stop can wait: the state is the previous step's, bit by bit.
TEST(Trainer, AStepThatTakesLongIsAbandoned) {
  for (const bool virtual_shards : {false, true}) {
    SCOPED_TRACE(virtual_shards);
    const auto group = make_single_group();
    configs::Config config = toy_config(6);
    config.mutable_train()->set_micro_batch(1);
    if (virtual_shards) config.mutable_train()->mutable_invariant()->set_shards(4);
    const auto trained_to_2 = [&](ToyTraining& training, const std::function<void()>& in_step_3) {
      const StopSignals signals;
      training.before_batch = [&](std::int64_t step) {
        if (step == 3) in_step_3();
      };
      EXPECT_EQ(training.run(signals), Outcome::kRequeue);
    };
    ToyTraining interrupted(config, *group, at::kFloat);
    trained_to_2(interrupted, [&] {
      interrupted.request_stop(SIGTERM);
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    });
    EXPECT_EQ(interrupted.state.step, 3) << "a short step is done";

    ToyTraining abandoned(config, *group, at::kFloat);
    bool slow = false;
    abandoned.model.before_pass = [&] {
      if (std::exchange(slow, false)) std::this_thread::sleep_for(std::chrono::milliseconds(2100));
    };
    trained_to_2(abandoned, [&] {
      abandoned.request_stop(SIGTERM);
      slow = true;
    });
    EXPECT_EQ(abandoned.state.step, 2);
    EXPECT_EQ(abandoned.state.consumed, 24);
    const StopSignals signals;
    abandoned.before_batch = {};
    EXPECT_EQ(abandoned.run(signals), Outcome::kDone);
    ToyTraining whole(config, *group, at::kFloat);
    EXPECT_EQ(whole.run(signals), Outcome::kDone);
    EXPECT_TRUE(abandoned.parameters().equal(whole.parameters()));
  }
}

TEST(StopRequest, KnowsTheEndOfTheJob) {
  const StopSignals signals;
  const double now = unix_seconds();
  std::optional<double> end;
  StopRequest stop(signals, [&] { return end; });
  EXPECT_FALSE(stop.asked()) << "no limit";
  end = now + 100;
  EXPECT_FALSE(stop.asked());
  stop.set_needed_seconds(90);
  EXPECT_FALSE(stop.asked());
  EXPECT_EQ(stop.why(), "another rank asked to stop");
  stop.set_needed_seconds(101);
  EXPECT_TRUE(stop.asked());
  EXPECT_FALSE(stop.pressing());
  EXPECT_EQ(stop.why(), "the job's time limit is near");
  end = now + 1000;
  EXPECT_TRUE(stop.asked()) << "a request is not taken back";
}

}  // namespace
}  // namespace birkhoff
