// A command that was interrupted or killed leaves no process, no shared memory and no copy of its
// input.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <fstream>
#include <sstream>
#include <thread>

#include "tests/launcher/pipe_ends.h"
#include "tests/launcher/processes/train_process_fixture.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using std::chrono::seconds;
using testing::HasSubstr;

class CleanupTest : public TrainProcess {
 protected:
  static Command train_for_ever(const std::string& name) {
    return train(name, {"--ranks", "2", "--set", "train.steps=1000000", "--set",
                        "train.schedule.shape=constant", "--set", "watchdog.seconds=100"});
  }

  // The folder where the ranks of a run share memory, from mpirun's arguments.
  static fs::path shared_folder_of(const std::string& name) {
    std::ifstream file("/proc/" + std::to_string(mpirun_of(run(name))) + "/cmdline");
    std::string argument;
    while (std::getline(file, argument, '\0') && argument != "btl_vader_backing_directory") {
    }
    std::getline(file, argument, '\0');
    return argument;
  }

  // Kills the child and all processes of the run.
  static void kill_everything(Child& child, const std::string& name) {
    child.signal(SIGKILL);
    kill_all(processes_of(run(name)));
    child.finish(seconds(5));
    ASSERT_TRUE(wait_until_none(run(name), seconds(20)));
  }
};

// The first Ctrl-C waits for a save that a stopped rank cannot make; the second does not wait and
// ends all processes.
TEST_F(CleanupTest, ASecondCtrlCLeavesNothing) {
  const Command command = train_for_ever("twice");
  Child child(command);
  ASSERT_TRUE(wait_for_step(child, run("twice"), 5));
  const fs::path shared = shared_folder_of("twice");
  signal_rank(run("twice"), 1, SIGSTOP);
  child.signal(SIGINT);
  std::this_thread::sleep_for(std::chrono::milliseconds(300));  // two at once would be one
  EXPECT_TRUE(child.is_running()) << "the rank is stopped";
  child.signal(SIGINT);
  const Finished finished = child.finish();
  EXPECT_EQ(processes_of(run("twice")), std::vector<pid_t>()) << "outlive the command";
  EXPECT_EQ(finished.code, 128 + SIGINT);
  EXPECT_THAT(finished.err, HasSubstr("birkhoff: interrupted twice"));
  EXPECT_FALSE(fs::exists(shared)) << shared;
}

TEST_F(CleanupTest, AKilledMpirunLeavesNothing) {
  Child child(train_for_ever("mpirun"));
  ASSERT_TRUE(wait_for_step(child, run("mpirun"), 5));
  const fs::path shared = shared_folder_of("mpirun");
  int num_segments = 0;
  for (const auto& entry : fs::directory_iterator(shared))
    num_segments += entry.path().filename().string().rfind("vader_segment", 0) == 0 ? 1 : 0;
  EXPECT_EQ(num_segments, 2) << "the ranks share memory there";
  kill_all({mpirun_of(run("mpirun"))});
  const Finished finished = child.finish();
  EXPECT_EQ(finished.code, 7) << finished.err;
  EXPECT_EQ(processes_of(run("mpirun")), std::vector<pid_t>()) << "outlive the command";
  EXPECT_FALSE(fs::exists(shared)) << shared;
}

TEST_F(CleanupTest, WhatAllKilledLeaveTheNextStartRemoves) {
  Child living(train_for_ever("living"));
  ASSERT_TRUE(wait_for_step(living, run("living"), 5));
  const fs::path used = shared_folder_of("living");
  Child child(train_for_ever("everything"));
  ASSERT_TRUE(wait_for_step(child, run("everything"), 5));
  const fs::path left = shared_folder_of("everything");
  kill_everything(child, "everything");
  EXPECT_TRUE(fs::exists(left)) << "nobody was there to remove it";
  const Finished next = run_child(train("next", {"--ranks", "2", "--set", "train.steps=5"}));
  EXPECT_EQ(next.code, 0) << next.err;
  EXPECT_FALSE(fs::exists(left)) << left;
  EXPECT_TRUE(fs::exists(used)) << "another run's";
  living.signal(SIGTERM);
  EXPECT_EQ(living.finish().code, 75);
  EXPECT_FALSE(fs::exists(used)) << used;
}

// The program must not touch processes that it has not started, even its children: a script may
// start a monitor and then `exec birkhoff`.
TEST_F(CleanupTest, OtherChildrenAreLeftAlone) {
  Command command = train("other", {"--ranks", "2", "--set", "train.steps=5"});
  std::vector<std::string> line = {"/bin/sh", "-c",
                                   "sleep 1000 & echo $! > monitor; exec \"$0\" \"$@\""};
  line.insert(line.end(), command.line.begin(), command.line.end());
  command.line = line;
  const Finished finished = run_child(command);
  EXPECT_EQ(finished.code, 0) << finished.err;
  const pid_t monitor = std::stoi(read_bytes("monitor"));
  EXPECT_EQ(kill(monitor, 0), 0) << "still runs";
  kill(monitor, SIGKILL);
}

TEST_F(CleanupTest, CtrlCInPrepareLeavesNoCopyOfTheInput) {
  const std::string text = read_bytes("text.txt");
  const Command command{.line = birkhoff_line({"prepare", "--out", "piped", "-"}),
                        .input = "input"};
  const auto kill_after_half = [&](int signal) {
    NamedPipe pipe("input");
    Child child(command);
    pipe.open_for_write();
    pipe.write_all(text.substr(0, text.size() / 2));
    ASSERT_TRUE(wait_until([&] { return pipe.is_empty(); })) << "the input is not read";
    child.signal(signal);
    EXPECT_EQ(child.finish().code, 128 + signal);
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator("piped"))
      names.push_back(entry.path().filename().string());
    EXPECT_EQ(names, (std::vector<std::string>{".unfinished"}));
  };
  kill_after_half(SIGINT);
  kill_after_half(SIGKILL);
  NamedPipe pipe("input");
  Child child(command);
  pipe.open_for_write();
  pipe.write_all(text);
  pipe.close();
  const Finished finished = child.finish();
  EXPECT_EQ(finished.code, 0) << finished.err;
  const Finished verified = run_child({.line = birkhoff_line({"verify", "piped"})});
  EXPECT_EQ(verified.code, 0) << verified.err;
  for (const auto& entry : fs::directory_iterator("piped"))
    EXPECT_NE(entry.path().filename().string().front(), '.') << entry.path();
}

}  // namespace
}  // namespace birkhoff
