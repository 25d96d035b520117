// The batch script of `submit`, run by bash with stubs of Slurm's commands in PATH. Under a real
// Slurm: tests/slurm.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <map>
#include <set>
#include <thread>

#include "cluster/base/error.h"
#include "launcher/slurm/batch_script.h"
#include "tests/launcher/bad_input/damage.h"
#include "tests/launcher/child.h"
#include "tests/launcher/slurm/stub_programs.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

// Whatever a shell, sbatch or Slurm might read as more than text, except a line end.
constexpr const char* kHostile = "a b'c\"d$(touch pwned)`touch pwned`$HOME;&|*?#{x,y}~!%j é";

class ScriptTest : public testing::Test {
 protected:
  ScriptTest() : stubs_(folder_.path() / "stubs") {
    work_ = folder_.path() / kHostile;
    fs::create_directories(work_);
    job_ = {.name = kHostile,
            .time = "1:00",
            .nodes = 1,
            .program = work_ / "program $(x)",
            .work_folder = work_,
            .output_folder = work_ / "run.slurm/1",
            .runs = {{work_ / "config 'a'.txtpb", work_ / "run \"a\""}},
            .train_options = {"--ranks", "2", "--container", kHostile},
            .doctor_options = {}};
    site_.set_ranks_per_node(1);
    stubs_.write("squeue", "echo RUNNING None");
    stubs_.write("scontrol", "");
    stubs_.write_at(job_.program, "exit ${STUB_CODE:-0}");
    fs::create_directories(job_.output_folder);
  }

  // The script of job_, run as Slurm would.
  Command script() {
    const fs::path file = folder_.path() / "job.sh";
    write_bytes(file.string(), batch_script(job_, site_));
    return {.line = {"bash", file.string()},
            .folder = folder_.path(),
            .environment = {{"PATH", stubs_.path()}, {"SLURM_JOB_ID", "17"}}};
  }
  // after: the job that it follows in a chain.
  Finished run_script(const std::string& code = "0", const std::string& after = "") {
    Command command = script();
    command.environment.emplace_back("STUB_CODE", code);
    if (!after.empty()) command.line.push_back(after);
    return run_child(command);
  }
  // From now on the program saves a checkpoint and ends with 75.
  void save_when_run() {
    const std::string step = (job_.runs[0].folder / "checkpoints/step-1").string();
    stubs_.write_at(job_.program, "mkdir -p " + shell_quoted(step) + "; exit 75");
  }
  // What the script has recorded of the job's end.
  std::string end_of(const std::string& job) const {
    const fs::path file = job_end(job_.output_folder, job);
    return fs::exists(file) ? read_bytes(file.string()) : "";
  }

  TemporaryFolder folder_{"birkhoff_script"};
  StubPrograms stubs_;
  fs::path work_;
  BatchJob job_;
  configs::Site site_;
};

TEST_F(ScriptTest, PassesEveryFieldLiterally) {
  site_.set_cpus_per_rank(3);
  site_.add_environment(std::string("BIRKHOFF_HOSTILE=") + kHostile);
  site_.add_modules(kHostile);
  stubs_.write("module", "");
  stubs_.write_at(job_.program, "printf '%s' \"$BIRKHOFF_HOSTILE/$OMP_NUM_THREADS/$PWD\" >seen");
  const Finished finished = run_script();
  EXPECT_EQ(finished.code, 0) << finished.out << finished.err;
  EXPECT_EQ(finished.err, "");
  EXPECT_THAT(stubs_.calls("module"), ElementsAre(ElementsAre("load", kHostile)));
  EXPECT_THAT(stubs_.calls(job_.program.filename()),
              ElementsAre(ElementsAre("train", job_.runs[0].config.string(), "--run",
                                      job_.runs[0].folder.string(), "--ranks", "2", "--container",
                                      kHostile)));
  EXPECT_EQ(read_bytes((work_ / "seen").string()), std::string(kHostile) + "/3/" + work_.string());
  for (const auto& entry : fs::recursive_directory_iterator(folder_.path())) {
    EXPECT_NE(entry.path().filename(), "pwned");
  }
}

TEST_F(ScriptTest, PassesLineEndsLiterally) {
  const std::string lines = "two\nlines\n";
  const fs::path work = folder_.path() / lines;
  fs::create_directories(work);
  job_.work_folder = work;
  job_.program = work / "program";
  job_.runs = {{work / "config", work / "run"}};
  job_.train_options = {"--container", lines};
  site_.add_environment("BIRKHOFF_HOSTILE=" + lines);
  stubs_.write_at(job_.program, "printf '%s' \"$BIRKHOFF_HOSTILE$PWD$2$4$6\" >seen");
  const Finished finished = run_script();
  EXPECT_EQ(finished.code, 0) << finished.out << finished.err;
  EXPECT_EQ(read_bytes((work / "seen").string()),
            lines + work.string() + (work / "config").string() + (work / "run").string() + lines);
}

TEST_F(ScriptTest, AnElementOfAnArrayTrainsItsRun) {
  job_.runs.push_back({work_ / "second", work_ / "run 2"});
  Command command = script();
  command.environment.emplace_back("SLURM_ARRAY_TASK_ID", "1");
  EXPECT_EQ(run_child(command).code, 0);
  const auto calls = stubs_.calls(job_.program.filename());
  ASSERT_EQ(calls.size(), 1u);
  EXPECT_EQ(calls[0][1], (work_ / "second").string());
  EXPECT_EQ(calls[0][3], (work_ / "run 2").string());
  // 17 is also the id of the whole array.
  command.environment.emplace_back("SLURM_ARRAY_JOB_ID", "17");
  command.environment.emplace_back("STUB_CODE", "75");
  EXPECT_EQ(run_child(command).code, 75);
  EXPECT_THAT(stubs_.calls("scontrol"), ElementsAre(ElementsAre("requeue", "17_1")));
  EXPECT_THAT(stubs_.calls("squeue").back(), Contains("--jobs=17_1"));
  EXPECT_THAT(batch_script(job_, site_),
              AllOf(HasSubstr("#SBATCH --array=0-1\n"), HasSubstr("/%A_%a.out\"\n")));
}

// The script may be queued by hand from a step of an array job.
TEST_F(ScriptTest, ItsProgramsSeeNothingOfTheJobThatQueuedIt) {
  stubs_.write_at(job_.program, "env >environment");
  Command command = script();
  for (const char* name :
       {"SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_CPU_BIND", "SLURM_MEM_PER_CPU", "PMI_RANK",
        "PMIX_RANK", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "PMIX_MCA_gds"}) {
    command.environment.emplace_back(name, "9");
  }
  const Finished finished = run_child(command);
  EXPECT_EQ(finished.code, 0) << finished.err;
  EXPECT_THAT(finished.out, HasSubstr("job 17: "));
  const std::string environment = read_bytes((work_ / "environment").string());
  EXPECT_THAT(environment,
              AllOf(HasSubstr("SLURM_JOB_ID=17\n"), HasSubstr("PMIX_MCA_gds=9\n"),
                    Not(HasSubstr("_STEP_")), Not(HasSubstr("RANK=")), Not(HasSubstr("_ARRAY_")),
                    Not(HasSubstr("_BIND=")), Not(HasSubstr("_MEM_"))));
}

TEST_F(ScriptTest, OptionsOfSbatchAreQuotedAsItReadsThem) {
  job_.name = "a \"b\" \\ 'c' #d";
  job_.output_folder = "/runs/50% done.slurm/1";
  site_.set_partition("gpu");
  site_.set_constraint("a&b");
  site_.add_exclude("node[1-2]");
  site_.add_exclude("node9");
  site_.set_gpus_per_node(4);
  site_.set_signal_seconds(90);
  site_.add_sbatch("--mem=0");
  EXPECT_THAT(
      batch_script(job_, site_),
      AllOf(HasSubstr("#SBATCH --job-name=\"a \\\"b\\\" \\\\ 'c' #d\"\n"),
            HasSubstr("#SBATCH --output=\"/runs/50%% done.slurm/1/%j.out\"\n"),
            HasSubstr("#SBATCH --partition=gpu\n"), HasSubstr("#SBATCH --constraint=\"a&b\"\n"),
            HasSubstr("#SBATCH --exclude=\"node[1-2],node9\"\n"),
            HasSubstr("#SBATCH --gpus-per-node=4\n"), HasSubstr("#SBATCH --signal=B:USR1@90\n"),
            HasSubstr("#SBATCH --requeue\n"), HasSubstr("#SBATCH --no-kill\n#"),
            HasSubstr("#SBATCH --open-mode=append\n"), HasSubstr("#SBATCH --mem=0\n"),
            Not(HasSubstr("--account"))));
  site_.set_signal_seconds(0);
  site_.set_requeue(false);
  EXPECT_THAT(batch_script(job_, site_),
              AllOf(Not(HasSubstr("--signal")), HasSubstr("#SBATCH --no-requeue\n"),
                    Not(HasSubstr("scontrol"))));
}

TEST_F(ScriptTest, WhatSbatchCannotExpressIsRefused) {
  const auto refusal = [this] {
    try {
      batch_script(job_, site_);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kUsage);
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  job_.name = "two\nlines";
  EXPECT_THAT(refusal(), AllOf(HasSubstr("--job-name"), HasSubstr("control character")));
  job_.name = "my_HetJob";
  EXPECT_THAT(refusal(), HasSubstr("'HetJob'"));
  job_.name = std::string(9000, 'x');
  EXPECT_THAT(refusal(), HasSubstr("too long (9000 bytes)"));
  job_.name = "x";
  job_.output_folder = "/a\\b";
  EXPECT_THAT(refusal(), AllOf(HasSubstr("/a\\b"), HasSubstr("backslash")));
  job_.output_folder = "/a\nb";
  EXPECT_THAT(refusal(), HasSubstr("--output"));
}

TEST_F(ScriptTest, SaysHowItEndedAndRequeuesWhatWasSaved) {
  Finished finished = run_script("0");
  EXPECT_EQ(finished.code, 0);
  EXPECT_THAT(finished.out, HasSubstr("job 17: the run is finished\n"));
  EXPECT_EQ(end_of("17"), "0 the run is finished\n");
  finished = run_script("9");
  EXPECT_EQ(finished.code, 9);
  EXPECT_THAT(finished.out, HasSubstr("job 17: failed with exit code 9"));
  EXPECT_THAT(end_of("17"), StartsWith("9 failed with exit code 9"));
  EXPECT_THAT(stubs_.calls("scontrol"), ElementsAre());
  finished = run_script("75");
  EXPECT_EQ(finished.code, 75);
  EXPECT_THAT(finished.out, HasSubstr("job 17: saved; goes back to the queue\n"));
  EXPECT_EQ(end_of("17"), "") << "it has not ended";
  EXPECT_THAT(stubs_.calls("scontrol"), ElementsAre(ElementsAre("requeue", "17")));
  stubs_.write("scontrol", "exit 1");
  finished = run_script("75");
  EXPECT_EQ(finished.code, 75);
  EXPECT_THAT(finished.out, HasSubstr("cannot go back to the queue: submit it again\n"));
}

TEST_F(ScriptTest, AJobThatSlurmHasEndedIsNotRequeued) {
  stubs_.write("squeue", "echo COMPLETING None");
  EXPECT_THAT(run_script("75").out, HasSubstr("saved; ended by Slurm (COMPLETING)\n"));
  EXPECT_THAT(stubs_.calls("scontrol"), ElementsAre());
  stubs_.write("squeue", "echo COMPLETING TimeLimit");
  EXPECT_THAT(run_script("75").out, HasSubstr("nothing new was saved before the time limit"));
  save_when_run();
  EXPECT_THAT(run_script("75").out, HasSubstr("saved; goes back to the queue\n"));
  EXPECT_EQ(stubs_.calls("scontrol").size(), 1u);
  site_.set_requeue(false);
  stubs_.write("squeue", "echo RUNNING None");
  EXPECT_THAT(run_script("75").out, HasSubstr("saved; submit it again to continue\n"));
}

TEST_F(ScriptTest, AJobThatSavesNothingDoesNotComeBackForEver) {
  for (int round = 0; round < 2; ++round) {
    for (int start = 0; start < 4; ++start) {
      EXPECT_THAT(run_script("75").out, HasSubstr("goes back to the queue")) << start;
    }
    if (round > 0) break;
    save_when_run();
    EXPECT_THAT(run_script("75").out, HasSubstr("goes back to the queue"));
    stubs_.write_at(job_.program, "exit 75");
  }
  const Finished last = run_script("75");
  EXPECT_EQ(last.code, 75);
  EXPECT_THAT(last.out, HasSubstr("saved nothing new in 5 starts"));
}

TEST_F(ScriptTest, DoctorExaminesTheNodesFirst) {
  job_.doctor_options = {"--ranks", "3", kHostile};
  stubs_.write_at(job_.program, "[ \"$1\" = train ] || exit ${STUB_CODE:-0}");
  EXPECT_EQ(run_script("0").code, 0);
  const std::string name = job_.program.filename(), config = job_.runs[0].config.string(),
                    run = job_.runs[0].folder.string();
  const auto calls = stubs_.calls(name);
  ASSERT_EQ(calls.size(), 2u);
  EXPECT_THAT(calls[0], ElementsAre("doctor", config, "--run", run, "--ranks", "3", kHostile));
  EXPECT_EQ(calls[1][0], "train");
  stubs_.forget_calls();
  EXPECT_EQ(run_script("6").code, 6);
  EXPECT_EQ(stubs_.calls(name).size(), 1u) << "it does not train";
}

TEST_F(ScriptTest, AChainEndsWithAFailureThatWouldComeAgain) {
  EXPECT_EQ(run_script("0", "16").code, 0) << "16 has left no record: it was killed";
  for (const auto& [code, goes_on] : std::map<std::string, bool>{
           {"0", true}, {"75", true}, {"7", true}, {"6", true}, {"3", false}, {"9", false}}) {
    SCOPED_TRACE(code);
    write_bytes(job_end(job_.output_folder, "16").string(), code + " failed\n");
    const Finished finished = run_script("0", "16");
    EXPECT_EQ(std::to_string(finished.code), goes_on ? "0" : code);
    EXPECT_THAT(end_of("17"), goes_on ? HasSubstr("the run is finished")
                                      : HasSubstr("job 16, which it follows, failed"));
  }
}

// A process on another node of the job puts it back if Slurm has taken the script's node from it.
TEST_F(ScriptTest, TheLossOfItsNodeIsNoticed) {
  job_.nodes = 3;
  stubs_.write("srun", "while [ \"$1\" != bash ]; do shift; done; exec \"$@\"");
  stubs_.write("scontrol", "[ \"$1\" != show ] || printf '%s\\n' node1 node2 node3");
  stubs_.write_at(job_.program, "/bin/sleep 2");
  struct Case {
    std::string node, running;  // of the script; "restarts nodes", as squeue prints it
    bool lost;
  };
  for (const Case& c : {Case{"node1", "0 node[1-3]", false}, Case{"node0", "0 node[1-3]", true},
                        Case{"node0", "1 node[1-3]", false},  // Slurm has started it again
                        Case{"node0", "", false}}) {          // it has ended
    SCOPED_TRACE(c.node + ": " + c.running);
    stubs_.forget_calls();
    stubs_.write("sleep", "exec /bin/sleep 0.1");
    stubs_.write("squeue", "[[ \"$*\" != *--states=RUNNING* ]] || echo '" + c.running + "'");
    Command command = script();
    command.environment.emplace_back("SLURMD_NODENAME", c.node);
    EXPECT_EQ(run_child(command).code, 0);
    stubs_.write("sleep", "exit 1");  // ends the loops of the steps, as Slurm does with the job
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    const auto requeue = ElementsAre("requeue", "Incomplete", "17");
    EXPECT_EQ(testing::Matches(Contains(requeue))(stubs_.calls("scontrol")), c.lost);
    std::set<std::string> guarded;
    for (const auto& call : stubs_.calls("srun")) {
      for (const std::string& word : call) {
        if (word.starts_with("--nodelist=")) guarded.insert(word.substr(11));
      }
    }
    EXPECT_THAT(guarded,
                c.node == "node1" ? ElementsAre("node2", "node3") : ElementsAre("node1", "node2"));
  }
  site_.set_requeue(false);
  EXPECT_THAT(batch_script(job_, site_), Not(HasSubstr("srun")));
  site_.set_requeue(true);
  job_.nodes = 1;
  EXPECT_THAT(batch_script(job_, site_), Not(HasSubstr("srun")));
}

TEST_F(ScriptTest, WhatIsMissingOnTheNodeIsNamed) {
  site_.add_modules("gone");
  stubs_.write("module", "exit 1");
  Finished finished = run_script();
  EXPECT_EQ(finished.code, 2);
  EXPECT_THAT(finished.out, HasSubstr("gone: this module does not load\n"));
  stubs_.write("module", "");
  fs::remove(job_.program);
  finished = run_script();
  EXPECT_EQ(finished.code, 2);
  EXPECT_THAT(finished.out, HasSubstr("birkhoff is missing on"));
  job_.work_folder = folder_.path() / "gone";
  finished = run_script();
  EXPECT_EQ(finished.code, 2);
  EXPECT_THAT(finished.out, HasSubstr("the folder that it was submitted in is missing"));
}

// A run that saves step-2 when it is asked to stop.
class SignalsOfScripts : public ScriptTest {
 protected:
  std::string output_after(int signal, bool saves) {
    const std::string checkpoints = (job_.runs[0].folder / "checkpoints/step-").string();
    fs::create_directories(checkpoints + "1");
    // Perl, because bash cannot trap a signal that was ignored when it started.
    stubs_.write_at(job_.program,
                    "exec perl -e '$SIG{USR1} = sub { " +
                        std::string(saves ? "mkdir \"$ARGV[0]/checkpoints/step-2\"; " : "") +
                        "exit 75 }; mkdir \"ready\"; sleep 1 for 1..60' \"$4\"");
    Command command = script();
    command.output = (folder_.path() / "output").string();
    Child child(command);
    for (int i = 0; i < 600 && !fs::exists(work_ / "ready"); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    kill(child.pid(), signal);  // as Slurm's, only to the script
    return child.finish().out;
  }
};

TEST_F(SignalsOfScripts, BeforeTheTimeLimitItIsRequeued) {
  EXPECT_THAT(output_after(SIGUSR1, /*saves=*/true), HasSubstr("goes back to the queue"));
  EXPECT_EQ(stubs_.calls("scontrol").size(), 1u);
}

TEST_F(SignalsOfScripts, WithoutANewCheckpointItWouldComeBackForEver) {
  EXPECT_THAT(output_after(SIGUSR1, /*saves=*/false), HasSubstr("nothing new was saved"));
  EXPECT_EQ(stubs_.calls("scontrol").size(), 0u);
}

TEST_F(SignalsOfScripts, APreemptedJobIsRequeuedEvenIfItHasDoneNothing) {
  EXPECT_THAT(output_after(SIGTERM, /*saves=*/false), HasSubstr("goes back to the queue"));
}

TEST_F(SignalsOfScripts, ACancelledJobIsNotRequeued) {
  EXPECT_THAT(output_after(SIGUSR2, /*saves=*/true), HasSubstr("saved; canceled"));
  EXPECT_EQ(stubs_.calls("scontrol").size(), 0u);
}

// Skipped, by name, without shellcheck.
TEST_F(ScriptTest, ShellcheckFindsNothing) {
  if (run_child({.line = {"shellcheck", "--version"}}).code != 0) GTEST_SKIP() << "no shellcheck";
  site_.set_cpus_per_rank(2);
  site_.add_environment(std::string("A=") + kHostile);
  site_.add_modules("gcc/12");
  job_.doctor_options = {kHostile};
  site_.set_partition(kHostile);
  site_.set_account(kHostile);
  site_.set_qos(kHostile);
  site_.set_constraint(kHostile);
  site_.add_exclude(kHostile);
  for (const bool requeue : {true, false}) {
    site_.set_requeue(requeue);
    for (const int size : {1, 2}) {
      job_.nodes = size;
      job_.runs.resize(static_cast<std::size_t>(size), job_.runs[0]);
      const fs::path file = folder_.path() / "job.sh";
      write_bytes(file.string(), batch_script(job_, site_));
      EXPECT_EQ(run_child({.line = {"shellcheck", file.string()}}).out, "");
    }
  }
}

}  // namespace
}  // namespace birkhoff
