// The start of the program: the waiting of its threads, configurations from pipes, and the report
// of other load during a benchmark.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <ctime>

#include "cluster/base/cpu.h"
#include "cluster/base/text/plural.h"
#include "launcher/bench/other_load.h"
#include "tests/launcher/bad_input/damage.h"
#include "tests/launcher/bad_input/good_input.h"
#include "tests/launcher/child.h"
#include "tests/launcher/slurm/stub_programs.h"

namespace birkhoff {
namespace {

using testing::AllOf;
using testing::Each;
using testing::HasSubstr;
using testing::Not;
using testing::SizeIs;

// The working directory holds the files that bad_input.h lists.
class StartProcess : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = new TemporaryFolder("birkhoff_start");
    std::filesystem::current_path(folder_->path());
    make_good_input(folder_->path());
  }
  static void TearDownTestSuite() {
    std::filesystem::current_path("/");
    delete folder_;
  }

  static Finished birkhoff(const std::string& line, Environment environment = {}) {
    environment.insert(environment.begin(), {"OMP_NUM_THREADS", "1"});
    return run_child({.line = birkhoff_line(split_line(line)), .environment = environment});
  }

  // Runs a bash script with the program and its arguments as "$0" "$@".
  static Finished shell(const std::string& script, const std::string& line) {
    std::vector<std::string> words = {"bash", "-c", script};
    for (const std::string& word : birkhoff_line(split_line(line))) words.push_back(word);
    return run_child({.line = words, .environment = {{"OMP_NUM_THREADS", "1"}}});
  }

 private:
  static inline TemporaryFolder* folder_ = nullptr;
};

// How long threads spin before they sleep, as libgomp reported each time it was loaded.
std::vector<std::string> spin_counts(const std::string& messages) {
  const std::string name = "GOMP_SPINCOUNT = '";
  std::vector<std::string> counts;
  for (std::size_t at = messages.find(name); at != std::string::npos;
       at = messages.find(name, at + 1)) {
    const std::size_t begin = at + name.size();
    counts.push_back(messages.substr(begin, messages.find('\'', begin) - begin));
  }
  return counts;
}

const Environment kSaid = {{"OMP_DISPLAY_ENV", "verbose"},
                           {"OMP_WAIT_POLICY", std::nullopt},
                           {"GOMP_SPINCOUNT", std::nullopt},
                           {"KMP_BLOCKTIME", std::nullopt}};

Environment with(const std::string& variable, const std::string& value) {
  Environment environment = kSaid;
  environment.emplace_back(variable, value);
  return environment;
}

TEST_F(StartProcess, ThreadsOfEveryVerbSleepSoon) {
  const std::string step = "run/checkpoints/step-00000004";
  for (const std::string& line :
       {std::string("--version"), std::string("train good.txtpb --run alone"), "eval " + step,
        "sample " + step + " --prompt a --tokens 3", std::string("bench step good.txtpb --steps 1"),
        std::string("bench attention 'block_local { block: 8 }' --lengths 16 --rounds 1")}) {
    SCOPED_TRACE(line);
    const Finished finished = birkhoff(line, kSaid);
    ASSERT_EQ(finished.code, 0) << finished.err;
    EXPECT_THAT(spin_counts(finished.err), testing::ElementsAre("3000")) << finished.err;
  }
}

TEST_F(StartProcess, ThreadsOfRanksSleepSoonToo) {
  const Finished finished = birkhoff("train good.txtpb --run two --ranks 2", kSaid);
  ASSERT_EQ(finished.code, 0) << finished.err;
  // One count each from the supervisor and two ranks.
  EXPECT_THAT(spin_counts(finished.err), AllOf(SizeIs(3), Each("3000"))) << finished.err;
}

TEST_F(StartProcess, TheUsersWordOnWaitingStands) {
  const auto counts = [](const Environment& environment) {
    return spin_counts(birkhoff("--version", environment).err);
  };
  EXPECT_THAT(counts(with("GOMP_SPINCOUNT", "77")), testing::ElementsAre("77"));
  EXPECT_THAT(counts(with("OMP_WAIT_POLICY", "passive")), testing::ElementsAre("0"));
  EXPECT_THAT(counts(with("OMP_WAIT_POLICY", "active")),
              AllOf(SizeIs(1), Each(Not(testing::StrEq("3000")))));
  EXPECT_THAT(counts(with("KMP_BLOCKTIME", "5")),
              AllOf(SizeIs(1), Each(Not(testing::StrEq("3000")))));
}

// OpenMP would bind the first thread when it is loaded. Then the program sees one core, and all
// ranks compute on it.
TEST_F(StartProcess, VariablesThatBindThreadsLeaveAllCores) {
  const int cores = usable_cores();
  for (const auto& [name, value] :
       {std::pair("OMP_PROC_BIND", "true"), std::pair("OMP_PROC_BIND", "spread"),
        std::pair("OMP_PLACES", "cores"), std::pair("GOMP_CPU_AFFINITY", "0"),
        std::pair("KMP_AFFINITY", "compact"), std::pair("SLURM_CPU_BIND", "quiet,mask_cpu:0x1")}) {
    for (const int ranks : {0, 2}) {
      SCOPED_TRACE(std::string(name) + "=" + value + " with --ranks " + std::to_string(ranks));
      const std::string option = ranks == 0 ? "" : " --ranks " + std::to_string(ranks);
      const Finished finished = birkhoff("doctor --no-speed --json report.json" + option,
                                         {{"OMP_NUM_THREADS", std::nullopt}, {name, value}});
      EXPECT_EQ(finished.code, 0) << finished.err;
      const int threads = ranks == 0 ? cores : ranks * std::max(1, cores / ranks);
      EXPECT_THAT(read_bytes("report.json"),
                  HasSubstr(fmt::format("\"summary\": \"{} on {}\"", counted(threads, "thread"),
                                        counted(cores, "core"))));
    }
  }
}

// A binding of whole ranks stands, and a bad one is named.
TEST_F(StartProcess, RanksThatWereBoundToOneCoreAreTold) {
  const std::string line =
      "mpirun --oversubscribe --bind-to none -n 2 taskset -c \"$(taskset -cp $$ | grep -oE "
      "'[0-9]+$')\" \"$0\" train good.txtpb --run bound";
  const Finished finished = run_child({.line = {"bash", "-c", line, program_path()},
                                       .environment = {{"OMP_NUM_THREADS", std::nullopt},
                                                       {"SLURM_CPU_BIND", "quiet,map_cpu:0,0"},
                                                       {"OMPI_ALLOW_RUN_AS_ROOT", "1"},
                                                       {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"}}});
  EXPECT_EQ(finished.code, 0) << finished.err;
  EXPECT_THAT(finished.err,
              AllOf(HasSubstr("birkhoff: warning: threads: "),
                    HasSubstr("2 ranks with 2 threads share 1 core (SLURM_CPU_BIND is quiet,map"),
                    HasSubstr("; start fewer ranks there, or give each its own cores")));
}

TEST_F(StartProcess, SlowAttentionIsNamed) {
  const std::string line = "attention: layer 0, heads 0 to 1 (sinkhorn): block attention";
  EXPECT_THAT(birkhoff("train good.txtpb --run fast").err, testing::Not(HasSubstr("attention:")));
  const Finished finished = birkhoff("train good.txtpb --run slow --set train.precision=fp16");
  EXPECT_EQ(finished.code, 0) << finished.err;
  EXPECT_THAT(finished.err, HasSubstr(line));
  EXPECT_THAT(read_bytes("slow/log/rank-0.log"), HasSubstr(line));
  EXPECT_THAT(birkhoff("inspect slow").out,
              HasSubstr("attention    layer 0, heads 0 to 1 (sinkhorn): block attention"));
  EXPECT_THAT(birkhoff("inspect fast").out,
              HasSubstr("attention    the fastest path of cpu in all layers\n"));
}

// A shell keeps the variables of its job for longer than Slurm keeps the job.
TEST_F(StartProcess, AJobThatHasEndedIsNamed) {
  StubPrograms stubs(std::filesystem::current_path() / "stubs");
  stubs.write("srun", "exit 7");
  stubs.write("scontrol", "echo node0");
  for (const char* squeue : {"true", "echo 'slurm_load_jobs error: Invalid job id' >&2; exit 1"}) {
    stubs.write("squeue", squeue);
    const Finished finished =
        birkhoff("train good.txtpb --run expired --ranks 2 --restarts 1",
                 {{"PATH", stubs.path()}, {"SLURM_JOB_ID", "17"}, {"SLURM_JOB_NODELIST", "node0"}});
    EXPECT_EQ(finished.code, 2) << finished.err;
    EXPECT_THAT(finished.err, HasSubstr("Slurm job 17 has ended, but this shell still has its "
                                        "variables: `unset SLURM_JOB_ID`"));
  }
  EXPECT_THAT(stubs.calls("srun"), testing::IsEmpty());
}

TEST_F(StartProcess, StartsWithTheArgumentsItWasGiven) {
  const Finished finished = run_child(
      {.line = {"bash", "-c", "exec -a another \"$0\" 'no  subcommand' ''", program_path()},
       .environment = kSaid});
  EXPECT_EQ(finished.code, 2);
  EXPECT_THAT(finished.err, HasSubstr("unknown command 'no  subcommand'"));
}

TEST_F(StartProcess, AConfigurationComesThroughAPipe) {
  const std::string from_file = birkhoff("config print good.txtpb --set train.steps=6").out;
  const std::string from_pipe =
      shell("\"$0\" config print <(cat good.txtpb) --set train.steps=6", "").out;
  EXPECT_NE(from_file, "");
  EXPECT_EQ(from_pipe, from_file);
  EXPECT_EQ(shell("\"$0\" config diff <(cat good.txtpb) <(cat good.txtpb)", "").code, 0);
  // The configuration arrives in two parts.
  EXPECT_EQ(shell("\"$0\" config print --set train.steps=6 "
                  "<(head -c 50 good.txtpb; sleep 1; tail -c +51 good.txtpb)",
                  "")
                .out,
            from_file);
}

TEST_F(StartProcess, TrainsFromAPipe) {
  for (const std::string ranks : {"", " --ranks 2"}) {
    SCOPED_TRACE(ranks);
    const std::string run = "piped" + std::to_string(ranks.size());
    const std::string options = " --run " + run + ranks + " --set train.steps=3";
    const Finished finished =
        shell("\"$0\" train <(sed s/channels/channels/ good.txtpb)" + options, "");
    ASSERT_EQ(finished.code, 0) << finished.err;
    ASSERT_EQ(birkhoff("train good.txtpb --run like-" + run + ranks + " --set train.steps=3").code,
              0);
    EXPECT_EQ(read_bytes(run + "/config.txtpb"), read_bytes("like-" + run + "/config.txtpb"));
    // Running the same command line again continues.
    EXPECT_EQ(shell("\"$0\" train <(cat good.txtpb)" + options, "").code, 0);
  }
}

TEST_F(StartProcess, APipesConfigurationIsBlamedByItsPlace) {
  const Finished finished =
      shell("\"$0\" train <(echo 'train { stepz: 3 }') --run x --ranks 2", "");
  EXPECT_EQ(finished.code, 3);
  EXPECT_THAT(finished.err, AllOf(HasSubstr("/dev/fd/"), HasSubstr(":1:9: "), HasSubstr("stepz")));
  const Finished included = shell("\"$0\" config print <(echo 'include: \"good.txtpb\"')", "");
  EXPECT_EQ(included.code, 3);
  EXPECT_THAT(included.err, HasSubstr("a text that is not a file cannot include files"));
}

TEST_F(StartProcess, PrepareReadsPipes) {
  const Finished finished =
      shell("\"$0\" prepare --out from_pipe --tokenizer bytes <(cat text/one.txt)", "");
  EXPECT_EQ(finished.code, 0) << finished.err;
}

// ---- Other load during a benchmark.

constexpr ProcessorSeconds kQuiet = {.all = 20, .busy = 9.3, .stolen = 0, .own = 9};

TEST(OtherLoad, IsReportedWhereItMatters) {
  EXPECT_EQ(other_load_note(kQuiet, 2), "");
  EXPECT_EQ(other_load_note({}, 2), "");
  ProcessorSeconds busy = kQuiet;
  busy.busy = 19;
  EXPECT_EQ(other_load_note(busy, 2),
            "\nThe machine was not quiet: during the measurement, other processes used 1.0 of 2 "
            "CPUs.\n");
  ProcessorSeconds stolen = kQuiet;
  stolen.stolen = 5;
  EXPECT_THAT(other_load_note(stolen, 2),
              AllOf(HasSubstr("0.5 of 2 CPUs"), HasSubstr("0.5 by other virtual machines")));
  // Own time that the system's ticks do not include yet.
  ProcessorSeconds ahead = kQuiet;
  ahead.busy = 8;
  EXPECT_EQ(other_load_note(ahead, 2), "");
  // With many CPUs, half a CPU.
  EXPECT_EQ(other_load_note({.all = 1280, .busy = 14, .stolen = 0, .own = 10}, 128), "");
  EXPECT_NE(other_load_note({.all = 1280, .busy = 16, .stolen = 0, .own = 10}, 128), "");
  // A few ticks are not a measurement.
  EXPECT_EQ(other_load_note({.all = 0.2, .busy = 0.15, .stolen = 0, .own = 0.1}, 2), "");
}

double child_seconds(pid_t child) {
  clockid_t clock{};
  timespec time{};
  if (clock_getcpuclockid(child, &clock) != 0 || clock_gettime(clock, &time) != 0) return 0;
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

TEST(OtherLoad, CountsAnotherProcessAndNotThisOne) {
  constexpr double kWork = 0.5;
  OtherLoad load;
  load.begin();
  const pid_t child = fork();
  if (child == 0) {
    for (;;) getppid();
  }
  while (child_seconds(child) < kWork) usleep(1000);
  const double worked = child_seconds(child);
  load.end();
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  const ProcessorSeconds counted = load.counted();
  EXPECT_GE(counted.busy - counted.own, 0.8 * worked);
  constexpr double kRounding = 1e-6;  // of differences of seconds since the start; a tick is 0.01
  EXPECT_GE(counted.all, counted.busy - kRounding);
  // The same work by this process does not count as other load.
  OtherLoad own;
  own.begin();
  const double start = own.counted().own;
  const double until = static_cast<double>(std::clock()) + kWork * CLOCKS_PER_SEC;
  while (static_cast<double>(std::clock()) < until) {
  }
  own.end();
  EXPECT_GE(own.counted().own - start, 0.9 * kWork);
}

}  // namespace
}  // namespace birkhoff
