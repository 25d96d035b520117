// Requests to stop, and the end of the job, in any phase of the real program.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <numeric>
#include <random>
#include <thread>

#include "runtime/checkpoint/commit.h"
#include "tests/launcher/processes/train_process_fixture.h"
#include "tests/sanitized.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using std::chrono::seconds;
using testing::HasSubstr;

using StopProcess = TrainProcess;

// While mpirun starts and while ranks load, check and meet, a request to stop is always obeyed.
// (Before main(), the program cannot catch a signal.)
TEST_F(StopProcess, ARequestAtAnyMomentOfTheStartIsObeyed) {
  const Command command = train("early", {"--ranks", "2", "--set", "train.steps=1000000"});
  for (const int delay_ms : {0, 50, 150, 300, 500, 700, 900, 1200, 1600}) {
    SCOPED_TRACE(std::to_string(delay_ms) + " ms");
    Child child(command);
    ASSERT_TRUE(wait_for_handler(child, SIGTERM));
    std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms));
    child.signal(SIGTERM);
    const Finished stopped = child.finish(seconds(30));
    EXPECT_EQ(stopped.code, 75) << stopped.err;
    EXPECT_TRUE(processes_of(run("early")).empty());
  }
}

// No request may interrupt a thread that computes (runtime/stopping/signals.h).
TEST_F(StopProcess, OneThreadOfARankTakesRequests) {
  Child child(train("threads", {"--set", "train.steps=1000000"}));
  ASSERT_TRUE(wait_for_step(child, run("threads"), 3));
  int num_threads = 0, num_open = 0;
  for (const auto& thread :
       fs::directory_iterator("/proc/" + std::to_string(child.pid()) + "/task")) {
    std::ifstream file(thread.path() / "status");
    const std::string status{std::istreambuf_iterator<char>(file), {}};
    const std::string label = "SigBlk:\t";
    const std::size_t at = status.find(label);
    if (at == std::string::npos) continue;  // it has just ended
    const std::uint64_t blocked = std::stoull(status.substr(at + label.size()), nullptr, 16);
    ++num_threads;
    num_open += (blocked >> (SIGTERM - 1) & 1) == 0;
  }
  EXPECT_GT(num_threads, 3);
  EXPECT_EQ(num_open, 1);
  child.signal(SIGTERM);
  EXPECT_EQ(child.finish(seconds(30)).code, 75);
}

// A request in any phase of a run is obeyed within a grace of 20 s; no step is repeated or skipped.
// Slow reads make a run that waits for data. BIRKHOFF_REQUESTS sets the number of trials.
TEST_F(StopProcess, ARequestInEveryPhaseIsObeyed) {
  struct Case {
    std::string name;
    std::vector<std::string> settings;
    Environment environment;
  };
  const std::vector<Case> cases = {
      {"step", {}, {}},
      {"evaluation", {"--set", "evaluate.every=1", "--set", "evaluate.micro_batch=1"}, {}},
      {"save", {"--set", "checkpoint.every=1"}, {}},
      {"data", {"--set", "data.prefetch=1"}, {{"LD_PRELOAD", SLOW_READS}}},
      {"loading", {}, {}},  // of a checkpoint
  };
  const char* set = std::getenv("BIRKHOFF_REQUESTS");
  const int trials = set != nullptr ? std::atoi(set) : 10;
  std::mt19937 random(1);
  int num_saved = 0;
  double slowest = 0;
  for (int trial = 0; trial < trials; ++trial) {
    const Case& phase = cases[static_cast<std::size_t>(trial / 2) % cases.size()];
    const int signal = trial % 2 == 0 ? SIGTERM : SIGUSR1;
    const std::string name = phase.name + std::to_string(trial);
    SCOPED_TRACE(name);
    std::vector<std::string> options = {
        "--ranks", "2", "--set", "train.steps=100000", "--set", "train.schedule.shape=constant"};
    options.insert(options.end(), phase.settings.begin(), phase.settings.end());
    Command command = train(name, options);
    command.environment = phase.environment;
    const bool loads = phase.name == "loading";
    if (loads) {
      Child earlier(command);
      ASSERT_TRUE(wait_for_step(earlier, run(name), 3));
      earlier.signal(SIGUSR1);
      ASSERT_EQ(earlier.finish(seconds(30)).code, 75);
    }
    Child child(command);
    ASSERT_TRUE(loads ? wait_for_handler(child, SIGTERM) : wait_for_step(child, run(name), 3));
    std::this_thread::sleep_for(std::chrono::milliseconds(random() % (loads ? 1500 : 300)));
    const auto asked = std::chrono::steady_clock::now();
    child.signal(signal);
    const Finished stopped = child.finish(seconds(30));
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - asked;
    slowest = std::max(slowest, taken.count());
    num_saved += stopped.code == 75 && taken < seconds(20);
    EXPECT_EQ(stopped.code, 75) << stopped.err;
    EXPECT_LT(taken, seconds(20));
    EXPECT_TRUE(processes_of(run(name)).empty());
    const int step = last_step(run(name));
    options[3] = "train.steps=" + std::to_string(step + 2);
    const Finished resumed = run_child(train(name, options));
    EXPECT_EQ(resumed.code, 0) << resumed.err;
    EXPECT_THAT(resumed.err, HasSubstr("resumes at step " + std::to_string(step)));
    const MetricsLines metrics = lines_of_metrics(run(name));
    std::vector<int> all_steps(static_cast<std::size_t>(step) + 2);
    std::iota(all_steps.begin(), all_steps.end(), 1);
    EXPECT_EQ(metrics.steps, all_steps) << "each step once";
    EXPECT_TRUE(phase.name != "evaluation" || metrics.evaluated == all_steps);
  }
  std::cout << "requests to stop: tried " << trials << ", lost " << trials - num_saved
            << ", slowest " << slowest << " s\n";
}

// What takes long is given up: a step of many micro-batches, and a rank that waits for data. The
// run saves the last step that it has done.
TEST_F(StopProcess, ARequestEndsWhatTakesLong) {
  struct Case {
    std::string name;
    std::vector<std::string> settings;
    Environment environment;
  };
  const std::string batch = kSanitized ? "500" : "10000";  // many seconds a step
  const std::vector<Case> cases = {
      {"accumulation",
       {"--set", "train.global_batch=" + batch, "--set", "train.micro_batch=1"},
       {}},
      {"no_data",
       {"--set", "data.prefetch=1"},
       {{"LD_PRELOAD", SLOW_READS}, {"BIRKHOFF_HANGING_READS", "60"}}}};
  for (const Case& phase : cases) {
    SCOPED_TRACE(phase.name);
    std::vector<std::string> options = {"--ranks", "2", "--set", "train.schedule.shape=constant"};
    options.insert(options.end(), phase.settings.begin(), phase.settings.end());
    Command command = train(phase.name, options);
    command.environment = phase.environment;
    Child child(command);
    ASSERT_TRUE(wait_for_step(child, run(phase.name), 1));
    std::this_thread::sleep_for(std::chrono::seconds(1));
    const auto asked = std::chrono::steady_clock::now();
    child.signal(SIGUSR1);
    const Finished stopped = child.finish(seconds(30));
    EXPECT_EQ(stopped.code, 75) << stopped.err;
    EXPECT_LT(std::chrono::steady_clock::now() - asked, seconds(20));
    const int step = last_step(run(phase.name));
    EXPECT_GE(step, 1);
    EXPECT_THAT(stopped.err,
                HasSubstr("a signal asked to stop: saved at step " + std::to_string(step)));
    EXPECT_EQ(checkpoint_names(run(phase.name)).back(), step_name(step));
  }
}

// A replay of a step has nothing to save: it ends after its round, or while its ranks start.
TEST_F(StopProcess, ARequestEndsAReplayOfAStep) {
  for (const int delay_ms : {200, 2500}) {
    SCOPED_TRACE(std::to_string(delay_ms) + " ms");
    Child child({.line = birkhoff_line({"bench", "comm", "tiny.txtpb", "--ranks", "2",
                                        "--vocabulary", "70", "--rounds", "100000"})});
    ASSERT_TRUE(wait_for_handler(child, SIGTERM));
    std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms));
    child.signal(SIGTERM);
    const Finished stopped = child.finish(seconds(30));
    EXPECT_EQ(stopped.code, 75) << stopped.err;
    EXPECT_EQ(stopped.out, "");
  }
}

TEST_F(StopProcess, ASaveThatFailsOnAnotherRankThanZeroEndsTheRun) {
  const std::string large = "model.channels=64";  // tensors of which a write can fail
  Command command = train("lost_save", {"--ranks", "2", "--restarts", "0", "--set", large});
  command.environment = {{"LD_PRELOAD", RANK_FAULTS}, {"RANK_FAULTS", "1:quota"}};
  const Finished finished = run_child(command);
  EXPECT_EQ(finished.code, 6) << finished.err;
  EXPECT_THAT(finished.err, HasSubstr("failed on rank 1: "));
  EXPECT_TRUE(checkpoint_names(run("lost_save")).empty());
}

// No signal is sent, but Slurm will end the job.
TEST_F(StopProcess, ARunSavesBeforeItsJobEnds) {
  const fs::path programs = folder_->path() / "programs";
  fs::create_directory(programs);
  write_bytes((programs / "squeue").string(), "#!/bin/sh\necho 0:16\n");
  fs::permissions(programs / "squeue", fs::perms::owner_all);
  Command command = train("job_ends", {"--set", "train.steps=100000000"});
  command.environment = {{"SLURM_JOB_ID", "17"},
                         {"PATH", programs.string() + ":" + std::getenv("PATH")}};
  const Finished stopped = run_child(command, seconds(40));
  EXPECT_EQ(stopped.code, 75);
  EXPECT_THAT(read_bytes(run("job_ends") / "log/rank-0.log"),
              HasSubstr("the job's time limit is near: saved at step "));

  // A job that is too short for anything new must not go back to the queue.
  const int step = last_step(run("job_ends"));
  write_bytes((programs / "squeue").string(), "#!/bin/sh\necho 0:05\n");
  const Finished hopeless = run_child(command, seconds(40));
  EXPECT_EQ(hopeless.code, 2);
  EXPECT_THAT(hopeless.err, HasSubstr("time limit is too short for a step and a save after step " +
                                      std::to_string(step)));
}

}  // namespace
}  // namespace birkhoff
