// The launcher's help and version texts, and its mapping of mpirun's exit codes.
#include "launcher/processes/supervisor.h"
#include "cluster/base/files/file.h"
#include "tests/launcher/child.h"
#include "tests/launcher/said.h"
#include "tests/launcher/slurm/stub_programs.h"
#include "tests/runtime/deliver.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <sstream>

namespace birkhoff {
namespace {

using testing::HasSubstr;

// waitpid's status of a process that exited with a code, or was ended by a signal.
constexpr int exited(int code) { return code << 8; }
constexpr int ended_by(int signal) { return signal; }

TEST(MapLauncherStatus, PassesOurCodesOn) {
  for (const int code : {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 75}) {
    for (const bool stop_requested : {false, true}) {
      std::string why;
      EXPECT_EQ(map_launcher_status("mpirun", exited(code), stop_requested, why), code);
    }
  }
  std::string why;
  map_launcher_status("mpirun", exited(75), false, why);
  EXPECT_EQ(why, "") << "the ranks have said why";
}

TEST(MapLauncherStatus, KilledRankIsALostPeer) {
  for (const int signal : {1, 2, 6, 9, 11, 15}) {
    std::string why;
    EXPECT_EQ(map_launcher_status("mpirun", exited(128 + signal), false, why), 7);
    EXPECT_THAT(why, HasSubstr("signal " + std::to_string(signal) + ";"));
    EXPECT_THAT(why, HasSubstr("run the same command again"));
  }
}

TEST(MapLauncherStatus, AnEndWithoutALineOfOursSaysWhatToTry) {
  std::string why;
  EXPECT_EQ(map_launcher_status("mpirun", exited(1), false, why), 1);
  EXPECT_THAT(why, HasSubstr("mpirun itself failed"));
  EXPECT_EQ(map_launcher_status("mpirun", exited(128 + 9), false, why), 7);
  EXPECT_THAT(why, HasSubstr("train.micro_batch"));
}

// Before its handler is installed, the signal that asks a rank to stop kills it: nothing is lost.
TEST(MapLauncherStatus, ARankStoppedWhileItLoadsIsARequeue) {
  for (const int signal : {SIGUSR1, SIGTERM}) {
    std::string why;
    EXPECT_EQ(map_launcher_status("mpirun", exited(128 + signal), true, why), 75);
    EXPECT_THAT(why, HasSubstr("stopped on request"));
    EXPECT_EQ(map_launcher_status("mpirun", exited(128 + signal), false, why), 7);
  }
}

TEST(MapLauncherStatus, MpirunThatCannotBeStartedIsALostPeer) {
  std::string why;
  EXPECT_EQ(map_launcher_status("mpirun", exited(127), false, why), 7);
  EXPECT_THAT(why, HasSubstr("mpirun could not be started"));
}

TEST(MapLauncherStatus, NamesTheLauncher) {
  for (const int status : {exited(1), exited(127), ended_by(9)}) {
    std::string why;
    map_launcher_status("srun", status, false, why);
    EXPECT_THAT(why, testing::AllOf(HasSubstr("srun"), testing::Not(HasSubstr("mpirun"))));
  }
}

TEST(MapLauncherStatus, KilledMpirunIsALostPeer) {
  std::string why;
  EXPECT_EQ(map_launcher_status("mpirun", ended_by(9), false, why), 7);
  EXPECT_THAT(why, HasSubstr("mpirun was ended by signal 9"));
}

struct Subcommand {
  std::vector<std::string> name;
  std::string purpose;
};

class HelpTest : public testing::TestWithParam<Subcommand> {};

TEST_P(HelpTest, HasPurposeAndTwoExamples) {
  std::vector<std::string> arguments = GetParam().name;
  arguments.push_back("--help");
  const Said said = birkhoff_says(arguments);
  EXPECT_EQ(said.code, 0);
  EXPECT_EQ(said.err, "");
  EXPECT_THAT(said.out, HasSubstr(GetParam().purpose));
  std::string subcommand = "birkhoff";
  for (const std::string& part : GetParam().name) subcommand += " " + part;
  EXPECT_THAT(said.out, HasSubstr("Usage: " + subcommand));
  const std::size_t examples = said.out.find("Examples:\n");
  ASSERT_NE(examples, std::string::npos) << said.out;
  int num_examples = 0;
  std::istringstream lines(said.out.substr(examples));
  for (std::string line; std::getline(lines, line);) {
    if (line.find(subcommand) != std::string::npos ||
        line.find("birkhoff train") != std::string::npos)
      ++num_examples;
  }
  EXPECT_GE(num_examples, 2) << said.out;
}

INSTANTIATE_TEST_SUITE_P(
    AllSubcommands, HelpTest,
    testing::Values(
        Subcommand{{"prepare"}, "Make a corpus folder from text"},
        Subcommand{{"train"}, "run the same command again to resume"},
        Subcommand{{"doctor"}, "before training"}, Subcommand{{"eval"}, "bits per byte"},
        Subcommand{{"sample"}, "Generate text"}, Subcommand{{"inspect"}, "Describe a"},
        Subcommand{{"runs"}, "List the runs"}, Subcommand{{"compare"}, "loss curves"},
        Subcommand{{"verify"}, "Check every byte"}, Subcommand{{"submit"}, "Submit a run to Slurm"},
        Subcommand{{"status"}, "a run's progress"}, Subcommand{{"tail"}, "until it ends"},
        Subcommand{{"cancel"}, "saves first"}, Subcommand{{"config"}, "configurations"},
        Subcommand{{"config", "print"}, "resolved"}, Subcommand{{"config", "diff"}, "differ"},
        Subcommand{{"config", "reference"}, "Markdown"}),
    [](const auto& test) { return test.param.name.back(); });

TEST(Help, OfTheProgramListsSubcommandsAndExitCodes) {
  const Said said = birkhoff_says({"--help"});
  EXPECT_EQ(said.code, 0);
  for (const char* subcommand :
       {"prepare", "train", "doctor", "eval", "sample", "inspect", "runs", "compare", "verify",
        "config", "bench", "submit", "status", "tail", "cancel"})
    EXPECT_THAT(said.out, HasSubstr(subcommand));
  for (const char* code :
       {"0 done", "2 usage", "3 configuration", "4 data", "5 checkpoint", "6 storage",
        "7 a rank was lost", "8 hang", "9 non-finite", "10 memory", "75 saved"}) {
    EXPECT_THAT(said.out, HasSubstr(code));
  }
}

TEST(Help, IsShownWhereNothingIsAskedFor) {
  const Said said = birkhoff_says({});
  EXPECT_EQ(said.code, 2);
  EXPECT_EQ(said.out, "");
  EXPECT_THAT(said.err, HasSubstr("Usage: birkhoff"));
}

TEST(Version, NamesEverythingLinked) {
  const Said said = birkhoff_says({"--version"});
  EXPECT_EQ(said.code, 0);
  for (const char* what : {"birkhoff", "compiler", "LibTorch", "MPI", "HDF5", "Protobuf",
                           "SentencePiece", "fmt", "CLI11", "nlohmann-json"}) {
    // A name followed by a number.
    EXPECT_THAT(said.out,
                testing::ContainsRegex(std::string(what) + "[^\n,]* v?[0-9]+(\\.[0-9]+)+"));
  }
}

// mpirun would wait forever.
TEST(Supervise, WithoutSharedMemoryNoRankIsStarted) {
  const TemporaryFolder folder("birkhoff_supervise");
  StubPrograms stubs(folder.path() / "stubs");
  stubs.write("mpirun", "exit 0");
  const std::string path = std::getenv("PATH");
  setenv("PATH", stubs.path().c_str(), 1);
  const auto start_two_ranks = [] {
    StopSignals signals;
    std::ostringstream err;
    return supervise({2}, {}, {"train"}, signals, err).code;
  };
  set_free_bytes_hook([](const std::string&) { return std::int64_t{8} << 20; });
  try {
    start_two_ranks();
    ADD_FAILURE() << "8 MiB are not enough";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kStorage);
    EXPECT_THAT(error.what(),
                testing::AllOf(HasSubstr("/dev/shm has 8.0 free"), HasSubstr("--shm-size")));
  }
  EXPECT_THAT(stubs.calls("mpirun"), testing::IsEmpty());
  set_free_bytes_hook([](const std::string&) { return std::int64_t{64} << 20; });
  EXPECT_EQ(start_two_ranks(), 0);
  EXPECT_EQ(stubs.calls("mpirun").size(), 1u);
  set_free_bytes_hook({});
  setenv("PATH", path.c_str(), 1);
}

// An srun that waits for a lost node is ended soon after a rank has noted why the job failed, and
// one that never starts its ranks after its limit; one that ends by itself is not.
TEST(Supervise, ALauncherThatWaitsForEverIsEnded) {
  const TemporaryFolder folder("birkhoff_supervise");
  StubPrograms stubs(folder.path() / "stubs");
  const std::string path = std::getenv("PATH");
  setenv("PATH", stubs.path().c_str(), 1);
  struct Case {
    std::string srun;
    TracesOfJob traces;
    int code;
    std::string why;
  };
  for (const Case& c : {Case{"sleep 60", {.began = true, .failure = 8}, 8, ""},
                        Case{"sleep 1; exit 8", {.began = true, .failure = 7}, 8, ""},
                        Case{"sleep 5; exit 8", {.began = true, .failure = 0}, 8, ""},
                        Case{"sleep 1; exit 8", {.began = false, .failure = 0}, 8, ""},
                        Case{"sleep 60", {.began = false, .failure = 0}, 7, "within 3 s"}}) {
    SCOPED_TRACE(c.srun);
    stubs.write("srun", c.srun);
    std::string asked;
    const RankProgram program{.by_mpirun = false,
                              .look =
                                  [&](const std::string& job) {
                                    asked = job;
                                    return c.traces;
                                  },
                              .launch_limit = std::chrono::seconds(3)};
    StopSignals signals;
    std::ostringstream err;
    const auto start = std::chrono::steady_clock::now();
    const EndOfRanks end = supervise({2, {"node0", "node1"}}, program, {"train"}, signals, err);
    EXPECT_EQ(end.code, c.code) << err.str();
    EXPECT_THAT(end.why, HasSubstr(c.why));
    EXPECT_EQ(end.job, asked);
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
  }
  setenv("PATH", path.c_str(), 1);
}

// Ranks that have not begun have nothing to save.
TEST(Supervise, ARequestEndsALaunchThatHangs) {
  const TemporaryFolder folder("birkhoff_supervise");
  StubPrograms stubs(folder.path() / "stubs");
  const std::string path = std::getenv("PATH");
  setenv("PATH", stubs.path().c_str(), 1);
  stubs.write("srun", "trap '' USR1; while :; do sleep 1; done");
  const RankProgram program{.by_mpirun = false,
                            .look = [](const std::string&) { return TracesOfJob{}; }};
  StopSignals signals;
  test::deliver(signals, SIGTERM);
  std::ostringstream err;
  const auto start = std::chrono::steady_clock::now();
  const EndOfRanks end = supervise({2, {"node0", "node1"}}, program, {"train"}, signals, err);
  EXPECT_EQ(end.code, 75);
  EXPECT_THAT(end.why, HasSubstr("stopped on request while its ranks were starting"));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(40));
  EXPECT_THAT(stubs.calls("srun")[0], testing::Contains("--export=ALL"));
  setenv("PATH", path.c_str(), 1);
}

}  // namespace
}  // namespace birkhoff
