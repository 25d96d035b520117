// Two jobs and one run folder: one trains; the other names the holder, or takes the folder from a
// job that does not answer.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>
#include <random>
#include <thread>

#include "runtime/checkpoint/run_folder.h"
#include "runtime/reporting/run_history.h"
#include "tests/cluster/base/tally.h"
#include "tests/launcher/processes/train_process_fixture.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;
using testing::HasSubstr;

// The number in a variable, or else `usual`.
int number_of(const char* variable, int usual) {
  const char* count = std::getenv(variable);
  return count == nullptr ? usual : std::atoi(count);
}

class HolderProcess : public TrainProcess {
 protected:
  static Command without_flock(Command command) {
    command.environment = {{"LD_PRELOAD", USELESS_FLOCK}};
    return command;
  }
};

TEST_F(HolderProcess, OfTwoJobsOneTrains) {
  std::mt19937 random(4);
  const int count = number_of("BIRKHOFF_RACES", 4);
  Tally tally("races for a run folder");
  for (int trial = 0; trial < count; ++trial)
    tally.attempt([&] {
      SCOPED_TRACE(trial);
      const std::string name = "race" + std::to_string(trial);
      Command command = train(name, {"--set", "train.steps=1000000"});
      if (trial % 2 == 1) command = without_flock(command);
      Child first(command);
      std::this_thread::sleep_for(milliseconds(random() % 400));
      Child second(command);
      while (first.is_running() && second.is_running()) {
        std::this_thread::sleep_for(milliseconds(10));
      }
      Child &loser = first.is_running() ? second : first,
            &winner = first.is_running() ? first : second;
      const Finished refused = loser.finish(seconds(1));
      EXPECT_EQ(refused.code, 2) << refused.err;
      EXPECT_THAT(refused.err, HasSubstr("is in use by process " + std::to_string(winner.pid())));
      ASSERT_TRUE(wait_for_step(winner, run(name), 3));
      EXPECT_THAT(run_holder(RunPaths{run(name)}).value_or("nobody"),
                  HasSubstr("process " + std::to_string(winner.pid())));
      winner.signal(SIGTERM);
      const Finished saved = winner.finish(seconds(30));
      EXPECT_EQ(saved.code, 75) << saved.err;
      EXPECT_EQ(read_history(RunPaths{run(name)}.history()).size(), 1u);
      fs::remove_all(run(name));
    });
}

// flock means nothing, and the holder is stopped for longer than its lease. It continues at a
// random moment, and ends without a trace.
TEST_F(HolderProcess, AJobThatDoesNotAnswerLosesTheFolder) {
  const Finished trained = run_child(train("one_rank", {}));
  ASSERT_EQ(trained.code, 0) << trained.err;
  std::mt19937 random(static_cast<unsigned>(number_of("BIRKHOFF_SEED", 5)));
  const int count = number_of("BIRKHOFF_TAKEOVERS", 1);
  double slowest = 0;
  Tally tally("run folders taken from stopped jobs");
  for (int trial = 0; trial < count; ++trial)
    tally.attempt([&] {
      SCOPED_TRACE(trial);
      const std::string name = "lost" + std::to_string(trial);
      const Command command = without_flock(train(name, {"--set", "checkpoint.every=1"}));
      Child old_holder(command);
      ASSERT_TRUE(wait_for_step(old_holder, run(name), 3 + static_cast<int>(random() % 20)));
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 5000));
      old_holder.signal(SIGSTOP);
      const int step = last_step(run(name));

      const auto start = steady_clock::now();
      Child new_holder(command);
      const fs::path history = RunPaths{run(name)}.history();
      while (new_holder.is_running() && read_history(history).size() < 2) {
        std::this_thread::sleep_for(milliseconds(20));
      }
      const double taken = std::chrono::duration<double>(steady_clock::now() - start).count();
      EXPECT_LE(taken, 20);
      slowest = std::max(slowest, taken);
      std::this_thread::sleep_for(milliseconds(random() % 1000));
      old_holder.signal(SIGCONT);
      const Finished lost = old_holder.finish(seconds(60));
      EXPECT_EQ(lost.code, 2) << "stopped at step " << step << '\n' << lost.err;
      EXPECT_THAT(lost.err, HasSubstr("was taken by process " + std::to_string(new_holder.pid())));
      const Finished finished = new_holder.finish(seconds(120));
      EXPECT_EQ(finished.code, 0) << finished.err;
      EXPECT_EQ(read_history(history).size(), 2u);
      expect_like_reference(name, "one_rank");
      fs::remove_all(run(name));
    });
  std::printf("the slowest took %.1f s\n", slowest);
}

}  // namespace
}  // namespace birkhoff
