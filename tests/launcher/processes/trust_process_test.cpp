// The real program's promises about its ranks: the same bits on any number of ranks on request,
// always the same bits on each rank, and an end when one hangs.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <fstream>
#include <random>
#include <sstream>

#include "tests/launcher/pipe_ends.h"
#include "tests/launcher/processes/train_process_fixture.h"
#include "tests/sanitized.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using std::chrono::seconds;
using testing::AllOf;
using testing::HasSubstr;

class TrustProcessTest : public TrainProcess {};

// ---- Any number of ranks

TEST_F(TrustProcessTest, InvariantRunsHaveTheSameBitsOnAnyNumberOfRanks) {
  const auto options = [](int ranks, int shards) {
    return std::vector<std::string>{"--ranks", std::to_string(ranks),
                                    "--set",   "train.global_batch=12",
                                    "--set",   "train.steps=40",
                                    "--set",   "evaluate.every=20",
                                    "--set",   "train.invariant.shards=" + std::to_string(shards)};
  };
  const auto train_on = [&](const std::string& name, int ranks, int shards) {
    const Finished finished = run_child(train(name, options(ranks, shards)));
    ASSERT_EQ(finished.code, 0) << finished.err;
  };
  for (const int ranks : {1, 2, 3, 4}) {
    train_on("invariant" + std::to_string(ranks), ranks, 12);
    train_on("plain" + std::to_string(ranks), ranks, 0);
  }
  const MetricsLines expected = lines_of_metrics(run("invariant1"));
  const auto tensors = final_tensors(run("invariant1"));
  ASSERT_GT(tensors.size(), 10u);
  bool plain_differs = false;
  for (const int ranks : {2, 3, 4}) {
    SCOPED_TRACE(std::to_string(ranks) + " ranks");
    const fs::path other = run("invariant" + std::to_string(ranks));
    EXPECT_EQ(lines_of_metrics(other).figures, expected.figures);
    EXPECT_TRUE(final_tensors(other) == tensors);
    plain_differs |=
        final_tensors(run("plain" + std::to_string(ranks))) != final_tensors(run("plain1"));
  }
  EXPECT_TRUE(plain_differs) << "without it the order of sums shows: else this test says nothing";

  // Stopped on four ranks, resumed on three.
  Child child(train("invariant_moved", options(4, 12)));
  ASSERT_TRUE(wait_for_step(child, run("invariant_moved"), 10));
  child.signal(SIGTERM);
  EXPECT_EQ(child.finish().code, 75);
  ASSERT_LT(last_step(run("invariant_moved")), 40);
  train_on("invariant_moved", 3, 12);
  EXPECT_EQ(lines_of_metrics(run("invariant_moved")).figures, expected.figures);
  EXPECT_TRUE(final_tensors(run("invariant_moved")) == tensors);
}

// ---- Ranks that differ

// Flips one bit wherever `bytes` occur in the memory of a process; returns the number of places.
int flip_in_memory(pid_t pid, const std::string& bytes) {
  const std::string proc = "/proc/" + std::to_string(pid);
  const int memory = open((proc + "/mem").c_str(), O_RDWR);
  if (memory < 0) return 0;
  int num_flipped = 0;
  std::ifstream maps(proc + "/maps");
  for (std::string line; std::getline(maps, line);) {
    std::uint64_t begin = 0, end = 0;
    char dash = 0;
    std::string rights;
    std::istringstream(line) >> std::hex >> begin >> dash >> end >> rights;
    if (rights != "rw-p" || end - begin > (std::uint64_t{1} << 30)) continue;
    std::string content(end - begin, '\0');
    const ssize_t size = pread(memory, content.data(), content.size(), static_cast<off_t>(begin));
    if (size <= 0) continue;
    content.resize(static_cast<std::size_t>(size));
    for (std::size_t at = content.find(bytes); at != std::string::npos;
         at = content.find(bytes, at + 1)) {
      const char flipped = static_cast<char>(bytes[10] ^ 0x10);
      num_flipped += pwrite(memory, &flipped, 1, static_cast<off_t>(begin + at + 10)) == 1;
    }
  }
  close(memory);
  return num_flipped;
}

// A learning rate of 0 keeps the parameters constant, so that they can be found in memory.
std::vector<std::string> standing_still(const std::string& on_difference) {
  return {"--ranks", "3",
          "--set",   "train.schedule.learning_rate=0",
          "--set",   "train.schedule.final_learning_rate=0",
          "--set",   "agreement.every=5",
          "--set",   "agreement.on_difference=" + on_difference};
}

bool has_checkpoint(const fs::path& run) {
  const std::vector<std::string> names = checkpoint_names(run);
  return !names.empty() && names.back().starts_with("step-");
}

// Trains, and flips a bit of the embedding in rank 1's memory once step 60 is done and a checkpoint
// shows what to flip.
Finished train_with_a_flip(Child& child, const fs::path& run) {
  EXPECT_TRUE(wait_for_step(child, run, 60));
  EXPECT_TRUE(wait_until([&] { return has_checkpoint(run) || !child.is_running(); }));
  const std::string pattern = final_tensors(run).at("embedding.weight").substr(0, 64);
  EXPECT_GE(flip_in_memory(process_of_rank(run, 1), pattern), 1);
  return child.finish(seconds(60));
}

TEST_F(TrustProcessTest, AFlippedBitStopsTheRunAndIsNamed) {
  const Command command = train("flip_stop", standing_still("stop"));
  Child child(command);
  const Finished finished = train_with_a_flip(child, run("flip_stop"));
  EXPECT_EQ(finished.code, 9) << finished.err;
  EXPECT_THAT(finished.err, AllOf(HasSubstr("rank 1 does not match the other ranks"),
                                  HasSubstr("embedding.weight")));
  const Finished resumed = run_child(command);
  EXPECT_EQ(resumed.code, 0) << resumed.err;
}

TEST_F(TrustProcessTest, AFlippedBitIsUndoneByTheLastCheckpoint) {
  const Finished reference = run_child(train("flip_reference", standing_still("restore")));
  ASSERT_EQ(reference.code, 0) << reference.err;
  Child child(train("flip_restore", standing_still("restore")));
  const Finished finished = train_with_a_flip(child, run("flip_restore"));
  EXPECT_EQ(finished.code, 0) << finished.err;
  EXPECT_THAT(finished.err, HasSubstr("going back to the last checkpoint"));
  expect_like_reference("flip_restore", "flip_reference");
}

TEST_F(TrustProcessTest, AnotherBuildOfTheProgramIsRefused) {
  const fs::path other = folder_->path() / "birkhoff";
  fs::copy_file(BIRKHOFF_PROGRAM, other, fs::copy_options::overwrite_existing);
  std::ofstream(other, std::ios::app | std::ios::binary) << '\0';
  Command command = mpirun(1, "programs");
  Command second = command;
  command.line.insert(command.line.end(), {":", "-n", "1", other.string()});
  // The arguments after the program in `mpirun -n 1 --oversubscribe ... birkhoff train ...`.
  const auto program = std::find(second.line.begin(), second.line.end(), BIRKHOFF_PROGRAM);
  ASSERT_NE(program, second.line.end());
  command.line.insert(command.line.end(), program + 1, second.line.end());
  const Finished finished = run_child(command);
  EXPECT_EQ(finished.code, 2) << finished.err;
  EXPECT_THAT(finished.err, HasSubstr("rank 1 runs a different program than rank 0"));
}

// ---- Hangs. BIRKHOFF_HANGS sets the number of trials of each kind; trials then use the default
// limits.

class Hangs : public TrustProcessTest {
 protected:
  static int num_trials() {
    const char* set = std::getenv("BIRKHOFF_HANGS");
    return set != nullptr ? std::atoi(set) : 2;
  }
  static double limit() { return std::getenv("BIRKHOFF_HANGS") != nullptr ? 8 : 1.5; }
  // The most seconds from a harm that the watchdog finds to the job's end. Sanitized programs end
  // slowly.
  static double most_to_end() { return limit() + (kSanitized ? 5 : 2); }

  // Runs hanging_ranks once per trial, with a different victim and step. Expects `code`, all of
  // `texts` (# stands for the victim's number, @ for the step), and the end in time.
  void try_harm(const std::string& mode, int code, const std::vector<std::string>& texts,
                double most_seconds) {
    constexpr int kRanks = 3;
    int num_named = 0;
    double slowest = 0;
    for (int trial = 0; trial < num_trials(); ++trial) {
      const int victim = trial % kRanks, step = 40 + trial;
      SCOPED_TRACE(mode + ", rank " + std::to_string(victim));
      Command command = {.line = {"mpirun", "-n", std::to_string(kRanks), "--oversubscribe",
                                  "--bind-to", "none", HANGING_RANKS, mode, std::to_string(victim),
                                  std::to_string(step), std::to_string(limit())},
                         .environment = {{"OMPI_ALLOW_RUN_AS_ROOT", "1"},
                                         {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"}}};
      const Finished finished = run_child(command, seconds(60));
      const auto end = std::chrono::steady_clock::now();
      EXPECT_EQ(finished.code, code) << finished.err;
      const std::string mark = "harm at ";
      const std::size_t harm = finished.err.find(mark);
      ASSERT_NE(harm, std::string::npos) << finished.err;
      const std::chrono::duration<double> taken =
          end.time_since_epoch() -
          std::chrono::nanoseconds(std::stoll(finished.err.substr(harm + mark.size())));
      slowest = std::max(slowest, taken.count());
      bool named = finished.code == code;
      for (std::string text : texts) {
        for (const auto& [sign, number] : {std::pair('#', victim), std::pair('@', step)}) {
          if (const std::size_t at = text.find(sign); at != std::string::npos) {
            text.replace(at, 1, std::to_string(number));
          }
        }
        EXPECT_THAT(finished.err, HasSubstr(text));
        named &= finished.err.find(text) != std::string::npos;
      }
      num_named += named;
      EXPECT_LT(taken.count(), most_seconds);
    }
    std::cout << mode << ": tried " << num_trials() << ", named " << num_named << ", slowest "
              << slowest << " s from the harm to the job's end\n";
  }
};

TEST_F(Hangs, ARankThatSkipsACollectiveIsNamed) {
  try_harm("skip", 8,
           {"no progress for", "rank # on ", "in step @, inside all_reduce 'counts'",
            "the others (ranks ", "inside all_reduce 'gradients'"},
           most_to_end());
}

TEST_F(Hangs, ARankThatDiesInsideACollectiveIsNamed) {
  try_harm(
      "die", 128 + SIGKILL,
      {"rank # on ", "in step @, inside all_reduce 'gradients'", "exited without an error message"},
      5);
}

TEST_F(Hangs, HealthyRanksRaiseNoAlarm) {
  const int num_steps = std::getenv("BIRKHOFF_HANGS") != nullptr ? 10000 : 500;
  const Finished finished = run_child(
      train("healthy", {"--ranks", "3", "--set", "train.steps=" + std::to_string(num_steps),
                        "--set", "metrics.every=100"}),
      seconds(900));
  EXPECT_EQ(finished.code, 0) << finished.err;
  for (const char* alarm : {"silent", "progress for", "without an error", "unwatched", "is slow"}) {
    EXPECT_EQ(finished.err.find(alarm), std::string::npos) << finished.err;
  }
  std::cout << "healthy steps: tried " << num_steps << ", alarms " << (finished.code != 0) << "\n";
}

// The real program: a rank that is stopped, by a debugger or a broken node.
TEST_F(Hangs, AStoppedRankIsNamedAndTheJobEnds) {
  constexpr int kRanks = 3;
  std::mt19937 random(8);
  int num_named = 0;
  double slowest = 0;
  for (int trial = 0; trial < num_trials(); ++trial) {
    const std::string name = "stopped" + std::to_string(trial);
    const int victim = trial % kRanks;
    SCOPED_TRACE(name + ", rank " + std::to_string(victim));
    Child child(train(name, {"--ranks", std::to_string(kRanks), "--set", "train.steps=1000000",
                             "--set", "watchdog.seconds=" + std::to_string(limit())}));
    ASSERT_TRUE(wait_for_step(child, run(name), 5 + static_cast<int>(random() % 100)));
    const auto start = std::chrono::steady_clock::now();
    signal_rank(run(name), victim, SIGSTOP);
    const Finished finished = child.finish(seconds(60));
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    slowest = std::max(slowest, taken.count());
    EXPECT_EQ(finished.code, 8) << finished.err;
    EXPECT_THAT(finished.err, AllOf(HasSubstr("birkhoff: rank " + std::to_string(victim) + " on "),
                                    HasSubstr("in step "), HasSubstr("silent for")));
    num_named += finished.code == 8;
    EXPECT_TRUE(wait_until_none(run(name), seconds(5))) << "nothing is left running";
    EXPECT_LT(taken.count(), most_to_end());
  }
  std::cout << "stop: tried " << num_trials() << ", named " << num_named << ", slowest " << slowest
            << " s from the stop to the job's end\n";
}

// ---- Slow ranks. BIRKHOFF_SLOW sets the number of trials. Every other one is of a rank that is
// stopped four fifths of the time, which shows only on a machine with nothing else to do.

class Slow : public TrustProcessTest {
 protected:
  static int num_trials() {
    const char* set = std::getenv("BIRKHOFF_SLOW");
    return set != nullptr ? std::atoi(set) : 1;
  }

  // Steps that take long enough for a fifth of one to count; sanitized ones do with less work.
  static Command train_longer(const std::string& name, int ranks, int steps) {
    const std::string batch = kSanitized ? "8" : "32";
    return train(name,
                 {"--ranks", std::to_string(ranks), "--set", "train.steps=" + std::to_string(steps),
                  "--set", "model.channels=256", "--set", "train.global_batch=" + batch, "--set",
                  "evaluate.every=0", "--set", "checkpoint.every=0", "--set",
                  "data.readers=1"});  // more would read ahead of a delay
  }
};

TEST_F(Slow, ARankThatIsSlowerThanTheOthersIsNamed) {
  constexpr int kRanks = 4;
  const std::string late = kSanitized ? ":delay=200" : ":delay=30";  // for longer steps
  int num_named = 0;
  for (int trial = 0; trial < num_trials(); ++trial) {
    const std::string name = "slow" + std::to_string(trial), errors = name + ".err";
    const int victim = trial % kRanks;
    Command command = train_longer(name, kRanks, 1000000);
    command.errors = errors;
    const bool reads = trial % 2 == 0;
    command.environment = {{"LD_PRELOAD", RANK_FAULTS},
                           {"RANK_FAULTS", std::to_string(victim) + (reads ? late : ":slow")}};
    Child child(command);
    const auto warned = [&] {
      std::ifstream file(errors);
      const std::string text((std::istreambuf_iterator<char>(file)), {});
      return text.find("is slow: it takes ") != std::string::npos;
    };
    const auto deadline = std::chrono::steady_clock::now() + seconds(60);
    while (!warned() && child.is_running() && std::chrono::steady_clock::now() < deadline)
      usleep(50'000);
    child.signal(SIGTERM);
    const Finished finished = child.finish(seconds(60));
    EXPECT_EQ(finished.code, 75) << finished.err;
    const std::string rank = "rank " + std::to_string(victim) + " on ";
    EXPECT_THAT(finished.err,
                AllOf(HasSubstr(": " + rank), HasSubstr("is slow: it takes "),
                      HasSubstr(reads ? "reading data" : "the forward and backward passes")));
    const Finished inspected = run_child({.line = birkhoff_line({"inspect", run(name).string()})});
    EXPECT_THAT(inspected.out, AllOf(HasSubstr("slow rank "), HasSubstr(rank)));
    std::size_t num_lines = 0;
    for (std::size_t at = 0; (at = finished.err.find("is slow:", at)) != std::string::npos; ++at)
      ++num_lines;
    EXPECT_EQ(num_lines, 1u) << "once for an episode, and no other rank: " << finished.err;
    num_named += num_lines == 1 && inspected.out.find(rank) != std::string::npos;
  }
  std::cout << "slow ranks: tried " << num_trials() << ", named " << num_named << "\n";
}

TEST_F(Slow, HealthyRanksRaiseNoAlarm) {
  const int num_steps = std::getenv("BIRKHOFF_SLOW") != nullptr ? 10000 : 40;
  const Finished finished = run_child(train_longer("steady", 2, num_steps), seconds(1500));
  EXPECT_EQ(finished.code, 0) << finished.err;
  EXPECT_EQ(finished.err.find("is slow"), std::string::npos) << finished.err;
  std::cout << "healthy steps of 2 ranks: tried " << num_steps << ", alarms "
            << (finished.err.find("is slow") != std::string::npos) << "\n";
}

}  // namespace
}  // namespace birkhoff
