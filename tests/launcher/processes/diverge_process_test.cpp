// Runs of the real program that diverge, end with 9, and continue with the fix that they print.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <random>

#include "tests/launcher/processes/train_process_fixture.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using std::chrono::seconds;
using testing::HasSubstr;
using testing::Not;

using Options = std::vector<std::string>;

class DivergeProcess : public TrainProcess {
 protected:
  // Saves every `every` steps; the learning rate does not depend on the number of steps.
  static Options good(int steps, int every, int ranks = 0) {
    Options options = {"--set", "train.steps=" + std::to_string(steps),
                       "--set", "checkpoint.every=" + std::to_string(every),
                       "--set", "train.schedule.shape=constant",
                       "--set", "evaluate.every=0"};
    if (ranks > 0) options.insert(options.end(), {"--ranks", std::to_string(ranks)});
    return options;
  }
  static Options diverging(Options options) {
    options.insert(options.end(),
                   {"--set", "train.schedule.learning_rate=1e30", "--set", "train.clip_norm=0"});
    return options;
  }
};

// As in the bug report: 40 steps, then a learning rate that destroys the model.
TEST_F(DivergeProcess, TheLastGoodCheckpointStandsAndTheCureWorks) {
  const Finished trained = run_child(train("diverged", good(40, 5)));
  ASSERT_EQ(trained.code, 0) << trained.err;
  const auto before = final_state(run("diverged"));
  for (int attempt = 0; attempt < 2; ++attempt) {
    const Finished finished = run_child(train("diverged", diverging(good(100, 5))));
    EXPECT_EQ(finished.code, 9) << finished.err;
    EXPECT_THAT(finished.err, HasSubstr("The checkpoint of step 40 predates the divergence: lower "
                                        "train.schedule.learning_rate and start again"));
    EXPECT_THAT(finished.err,
                HasSubstr("the learning rate jumps: step 41 has 1e+30, and had 0.001"));
    EXPECT_THAT(finished.err, Not(HasSubstr("-nan")));
    EXPECT_EQ(checkpoint_names(run("diverged")).back(), "step-00000040");
    EXPECT_TRUE(final_state(run("diverged")) == before);
  }
  const Finished cured = run_child(train("diverged", good(100, 5)));
  EXPECT_EQ(cured.code, 0) << cured.err;
  EXPECT_THAT(cured.err, HasSubstr("resumes at step 40"));
  const std::string last_line = cured.err.substr(cured.err.rfind('\n', cured.err.size() - 2) + 1);
  EXPECT_THAT(last_line, testing::ContainsRegex(
                             "diverged: finished: 100 steps, train loss [0-9.]+, valid loss "
                             "[0-9.]+, [0-9:]+, [0-9]+ tokens/s; checkpoint "
                             ".*/checkpoints/step-00000100\n$"));
  const Finished undisturbed = run_child(train("undisturbed", good(100, 5)));
  ASSERT_EQ(undisturbed.code, 0) << undisturbed.err;
  EXPECT_TRUE(final_state(run("diverged")) == final_state(run("undisturbed")));
}

TEST_F(DivergeProcess, ARunThatOnlyDivergedEndsWith9AndSavesNothing) {
  for (const int ranks : {0, 2}) {
    const std::string name = "only" + std::to_string(ranks);
    const Finished finished = run_child(train(name, diverging(good(15, 5, ranks))));
    EXPECT_EQ(finished.code, 9) << finished.err;
    EXPECT_THAT(finished.err, HasSubstr("step 15: training ends, but its last "));
    EXPECT_THAT(finished.err, HasSubstr("No checkpoint predates the divergence"));
    EXPECT_THAT(checkpoint_names(run(name)), testing::IsEmpty());
    const Finished cured = run_child(train(name, good(15, 5, ranks)));
    EXPECT_EQ(cured.code, 0) << cured.err;
    EXPECT_THAT(cured.err, HasSubstr("starts at step 0"));
  }
}

TEST_F(DivergeProcess, ARequestToStopWhileStepsAreSkippedSavesNothingAndSaysSo) {
  ASSERT_EQ(run_child(train("stopped", good(20, 5))).code, 0);
  Options options = diverging(good(1000000, 5));
  options.insert(options.end(), {"--set", "train.max_skipped=1000000"});
  Child child(train("stopped", options));
  ASSERT_TRUE(wait_for_step(child, run("stopped"), 40));
  child.signal(SIGTERM);
  const Finished stopped = child.finish(seconds(60));
  EXPECT_EQ(stopped.code, 75) << stopped.err;
  EXPECT_THAT(stopped.err, HasSubstr("not saved, because its last "));
  EXPECT_THAT(stopped.err, HasSubstr("The checkpoint of step 20 predates the divergence"));
  EXPECT_EQ(checkpoint_names(run("stopped")).back(), "step-00000020");
  const Finished cured = run_child(train("stopped", good(30, 5)));
  EXPECT_EQ(cured.code, 0) << cured.err;
}

// BIRKHOFF_HISTORIES sets their number, BIRKHOFF_SEED the first seed.
TEST_F(DivergeProcess, RandomHistoriesGoOnWithTheCure) {
  const char* count = std::getenv("BIRKHOFF_HISTORIES");
  const char* first = std::getenv("BIRKHOFF_SEED");
  const int num_histories = count != nullptr ? std::atoi(count) : 2;
  const int first_seed = first != nullptr ? std::atoi(first) : 1;
  int lost = 0;
  for (int seed = first_seed; seed < first_seed + num_histories; ++seed) {
    std::mt19937 random(static_cast<unsigned>(seed));
    const auto pick = [&](int least, int most) {
      return std::uniform_int_distribution<int>(least, most)(random);
    };
    const int every = pick(1, 8), before = pick(0, 3) == 0 ? 0 : pick(1, 30);
    const int to = before + pick(1, 40), more = pick(1, 20), ranks = pick(0, 1) * 2;
    const std::string name = "history" + std::to_string(seed);
    const std::string told = name + ": every " + std::to_string(every) + ", diverges after " +
                             std::to_string(before) + ", to " + std::to_string(to) + ", cured to " +
                             std::to_string(before + more) + ", ranks " + std::to_string(ranks);
    SCOPED_TRACE(told);
    const bool failed_before = HasFailure();
    if (before > 0) {
      EXPECT_EQ(run_child(train(name, good(before, every, ranks))).code, 0);
    }
    EXPECT_EQ(run_child(train(name, diverging(good(to, every, ranks)))).code, 9);
    const Finished cured = run_child(train(name, good(before + more, every, ranks)));
    EXPECT_EQ(cured.code, 0) << cured.err;
    EXPECT_THAT(cured.err, HasSubstr(before > 0 ? "resumes at step " + std::to_string(before)
                                                : "starts at step 0"));
    EXPECT_EQ(last_step(run(name)), before + more);
    lost += !failed_before && HasFailure();
    std::cout << told << "\n";
  }
  std::cout << "histories of real processes: tried " << num_histories << ", lost " << lost << "\n";
}

}  // namespace
}  // namespace birkhoff
