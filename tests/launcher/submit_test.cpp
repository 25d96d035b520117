// `submit`, `status`, `tail` and `cancel` without Slurm: the batch script itself, and the commands
// with stubs of Slurm's in PATH. Under a real Slurm: tests/slurm.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "child.h"
#include "cluster/base/error.h"
#include "configs/config_io.h"
#include "configs/site_io.h"
#include "damage.h"
#include "good_input.h"
#include "launcher/slurm/batch_script.h"
#include "launcher/slurm/submissions.h"
#include "said.h"
#include "stub_programs.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

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
            .train_options = {"--ranks", "2", "--container", kHostile}};
    site_.set_ranks_per_node(1);
    stubs_.write("squeue", "echo RUNNING");
    stubs_.write("scontrol", "");
    stubs_.write_at(job_.program, "exit ${STUB_CODE:-0}");
  }

  // The script of job_, run as Slurm would.
  Command script() {
    const fs::path file = folder_.path() / "job.sh";
    write_bytes(file.string(), batch_script(job_, site_));
    return {.line = {"bash", file.string()},
            .folder = folder_.path(),
            .environment = {{"PATH", stubs_.path()}, {"SLURM_JOB_ID", "17"}}};
  }
  Finished run_script(const std::string& code = "0") {
    Command command = script();
    command.environment.emplace_back("STUB_CODE", code);
    return run_child(command);
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

TEST_F(ScriptTest, AnElementOfAnArrayTrainsItsRun) {
  job_.runs.push_back({work_ / "second", work_ / "run 2"});
  Command command = script();
  command.environment.emplace_back("SLURM_ARRAY_TASK_ID", "1");
  EXPECT_EQ(run_child(command).code, 0);
  const auto calls = stubs_.calls(job_.program.filename());
  ASSERT_EQ(calls.size(), 1u);
  EXPECT_EQ(calls[0][1], (work_ / "second").string());
  EXPECT_EQ(calls[0][3], (work_ / "run 2").string());
  EXPECT_THAT(batch_script(job_, site_),
              AllOf(HasSubstr("#SBATCH --array=0-1\n"), HasSubstr("/%A_%a.out\"\n")));
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
  finished = run_script("9");
  EXPECT_EQ(finished.code, 9);
  EXPECT_THAT(finished.out, HasSubstr("job 17: failed with exit code 9"));
  EXPECT_THAT(stubs_.calls("scontrol"), ElementsAre());
  finished = run_script("75");
  EXPECT_EQ(finished.code, 75);
  EXPECT_THAT(finished.out, HasSubstr("job 17: saved; goes back to the queue\n"));
  EXPECT_THAT(stubs_.calls("scontrol"), ElementsAre(ElementsAre("requeue", "17")));
  stubs_.write("scontrol", "exit 1");
  finished = run_script("75");
  EXPECT_EQ(finished.code, 75);
  EXPECT_THAT(finished.out, HasSubstr("cannot go back to the queue: submit it again\n"));
}

TEST_F(ScriptTest, AJobThatSlurmHasEndedIsNotRequeued) {
  stubs_.write("squeue", "echo COMPLETING");
  EXPECT_THAT(run_script("75").out, HasSubstr("saved; ended by Slurm (COMPLETING)\n"));
  EXPECT_THAT(stubs_.calls("scontrol"), ElementsAre());
  site_.set_requeue(false);
  stubs_.write("squeue", "echo RUNNING");
  EXPECT_THAT(run_script("75").out, HasSubstr("saved; submit it again to continue\n"));
}

// A process on another node of the job puts it back if Slurm has taken the script's node from it.
TEST_F(ScriptTest, TheLossOfItsNodeIsNoticed) {
  job_.nodes = 2;
  stubs_.write("srun", "while [ \"$1\" != bash ]; do shift; done; exec \"$@\"");
  stubs_.write("sleep", "exec /bin/sleep 0.1");
  stubs_.write("squeue", "echo 'node[1-2]'");
  stubs_.write("scontrol", "[ \"$1\" != show ] || printf 'node1\\nnode2\\n'");
  stubs_.write_at(job_.program, "/bin/sleep 2");
  for (const auto& [node, lost] : {std::pair{"node1", false}, std::pair{"node", true}}) {
    Command command = script();
    command.environment.emplace_back("SLURMD_NODENAME", node);
    const Finished finished = run_child(command);
    EXPECT_EQ(finished.code, 0) << finished.out;
    const auto calls = stubs_.calls("scontrol");
    EXPECT_THAT(calls, Contains(ElementsAre("show", "hostnames", "node[1-2]")));
    EXPECT_EQ(testing::Matches(Contains(ElementsAre("requeue", "17")))(calls), lost) << node;
    for (const auto& [guard, guards] : {std::pair{"node1", lost}, std::pair{"node2", true}}) {
      const auto starts = Contains(Contains(std::string("--nodelist=") + guard));
      EXPECT_EQ(testing::Matches(starts)(stubs_.calls("srun")), guards) << node << ' ' << guard;
    }
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
  EXPECT_THAT(output_after(SIGUSR2, /*saves=*/true), HasSubstr("saved; cancelled"));
  EXPECT_EQ(stubs_.calls("scontrol").size(), 0u);
}

// Skipped, by name, without shellcheck.
TEST_F(ScriptTest, ShellcheckFindsNothing) {
  if (run_child({.line = {"shellcheck", "--version"}}).code != 0) GTEST_SKIP() << "no shellcheck";
  site_.set_cpus_per_rank(2);
  site_.add_environment(std::string("A=") + kHostile);
  site_.add_modules("gcc/12");
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

// The commands in this process, with stubs of Slurm's commands: sbatch gives the ids 17, 18, ...,
// and squeue prints the file `queue`.
class SlurmCommands : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = new TemporaryFolder("birkhoff_submit");
    fs::create_directories(folder_->path() / "good");
    make_good_input(folder_->path() / "good");
  }
  static void TearDownTestSuite() {
    fs::current_path("/");
    delete folder_;
  }

  void SetUp() override {
    fs::current_path("/");
    fs::remove_all(folder_->path() / "scratch");
    fs::copy(folder_->path() / "good", folder_->path() / "scratch", fs::copy_options::recursive);
    fs::current_path(folder_->path() / "scratch");
    stubs_.emplace(folder_->path() / "scratch/stubs");
    stubs_->write("sbatch", "n=$(wc -l <ids); echo $((n + 17)) | tee -a ids");
    stubs_->write("squeue", "cat queue");
    stubs_->write("scancel", "grep -v \"^${!#}|\" queue >rest; mv rest queue");
    write_bytes("ids", "");
    write_bytes("queue", "");
    write_bytes("site.txtpb", "time_limit: \"1:00:00\" ranks_per_node: 2 partition: \"p\"");
    before_ = std::getenv("PATH");
    setenv("PATH", stubs_->path().c_str(), 1);
  }
  void TearDown() override { setenv("PATH", before_.c_str(), 1); }

  // `submit good.txtpb --run RUN --site site.txtpb` and more.
  static Said submit(const std::string& run, const std::vector<std::string>& more = {}) {
    std::vector<std::string> line = {"submit", "good.txtpb", "--run", run, "--site", "site.txtpb"};
    line.insert(line.end(), more.begin(), more.end());
    return birkhoff_says(line);
  }
  static nlohmann::json status(const std::string& run) {
    const Said said = birkhoff_says({"status", run, "--json"});
    EXPECT_EQ(said.code, 0) << said.err;
    return nlohmann::json::parse(said.out);
  }
  std::vector<std::vector<std::string>> calls(const std::string& name) const {
    return stubs_->calls(name);
  }
  static std::string absolute(const std::string& path) { return fs::absolute(path).string(); }

  static inline TemporaryFolder* folder_ = nullptr;
  std::optional<StubPrograms> stubs_;
  std::string before_;
};

TEST_F(SlurmCommands, DryRunPrintsTheScriptAndLeavesNothing) {
  const Said said = submit("new", {"--nodes", "3", "--spare-nodes", "1", "--restarts", "7",
                                   "--least-ranks", "2", "--time", "2-00", "--dry-run"});
  EXPECT_EQ(said.code, 0) << said.err;
  EXPECT_THAT(said.out, AllOf(HasSubstr("#SBATCH --job-name=new\n"), HasSubstr("--nodes=3\n"),
                              HasSubstr("--ntasks-per-node=2\n"), HasSubstr("--time=2-00\n"),
                              HasSubstr("--partition=p\n"), HasSubstr("limit=172800")));
  EXPECT_THAT(said.out, HasSubstr("options=(\n  '--ranks'\n  '4'\n  '--restarts'\n  '7'\n"
                                  "  '--spare-nodes'\n  '1'\n  '--least-ranks'\n  '2')\n"));
  EXPECT_THAT(said.out, HasSubstr("run='" + absolute("new") + "'\n"));
  EXPECT_FALSE(fs::exists("new.slurm"));
  EXPECT_FALSE(fs::exists("new"));
  EXPECT_THAT(calls("sbatch"), ElementsAre());
}

TEST_F(SlurmCommands, JobsDoNotGetTheHostsThatDoctorExcludes) {
  write_bytes("site.txtpb", "time_limit: \"1:00:00\" exclude: \"node[1-2]\"");
  write_bytes("bad", "node7\nnode12.cluster\n\n");
  const Said said = submit("new", {"--exclude-file", "bad", "--dry-run"});
  EXPECT_EQ(said.code, 0) << said.err;
  EXPECT_THAT(said.out, HasSubstr("--exclude=\"node[1-2],node12.cluster,node7\"\n"));
}

TEST_F(SlurmCommands, TheConfigurationIsThatOfTheSubmission) {
  const Said said = submit("new", {"--set", "train.steps=77"});
  EXPECT_EQ(said.code, 0) << said.err;
  EXPECT_THAT(said.out, AllOf(HasSubstr("job 17: 1 node, 2 ranks, at most 1:00:00"),
                              HasSubstr(absolute("new.slurm/1"))));
  write_bytes("good.txtpb", "broken");
  const std::string stored = absolute("new.slurm/1/config.txtpb");
  EXPECT_EQ(load_config(stored, {}).train().steps(), 77);
  EXPECT_THAT(read_bytes("new.slurm/1/job.sh"), HasSubstr("config='" + stored + "'\n"));
  EXPECT_THAT(calls("sbatch"),
              ElementsAre(ElementsAre("--parsable", absolute("new.slurm/1/job.sh"))));
  EXPECT_EQ(status("new").at("state"), "new") << "squeue knows of no job: it is gone";
}

TEST_F(SlurmCommands, AChainWaitsForTheJobBefore) {
  EXPECT_EQ(submit("new", {"--chain", "3"}).code, 0);
  const auto lines = calls("sbatch");
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_EQ(lines[0].size(), 2u);
  EXPECT_EQ(lines[1][1], "--dependency=afterany:17");
  EXPECT_EQ(lines[2][1], "--dependency=afterany:18");
  EXPECT_EQ(submitted_jobs("new").size(), 3u);
}

TEST_F(SlurmCommands, ASweepIsAnArrayOfRunsOfTheirOwn) {
  const Said said = submit("rates", {"--sweep", "train.schedule.learning_rate=1e-3,3e-4"});
  EXPECT_EQ(said.code, 0) << said.err;
  EXPECT_THAT(read_bytes("rates.slurm/1/job.sh"), HasSubstr("#SBATCH --array=0-1\n"));
  EXPECT_FLOAT_EQ(
      load_config("rates.slurm/1/config-1.txtpb", {}).train().schedule().learning_rate(), 3e-4f);
  write_bytes("queue", "17_0|RUNNING|50:00|n[0-1]|None\n17_1|PENDING|1:00:00||Priority\n");
  EXPECT_EQ(status("rates/1e-3").at("jobs")[0].at("id"), "17_0");
  EXPECT_EQ(status("rates/3e-4").at("state"), "queued");
  const Said both = birkhoff_says({"status", "rates"});
  EXPECT_THAT(both.out, AllOf(HasSubstr(absolute("rates/1e-3")), HasSubstr(absolute("rates/3e-4")),
                              HasSubstr("waits: Priority")));
  EXPECT_EQ(birkhoff_says({"tail", "rates"}).code, 2);
  const Said cancelled = birkhoff_says({"cancel", "rates/3e-4"});
  EXPECT_THAT(cancelled.out, "job 17_1: removed from the queue\n");
  EXPECT_THAT(read_bytes("queue"), HasSubstr("17_0|"));
}

TEST_F(SlurmCommands, CancelAsksTheRunningJobToSave) {
  EXPECT_EQ(submit("new", {"--chain", "2"}).code, 0);
  write_bytes("queue",
              "17|RUNNING|50:00|n0|None\n18|PENDING|1:00:00||Dependency\n"
              "99|RUNNING|1:00:00|n1|None\n");
  EXPECT_THAT(submit("new").err, HasSubstr("its job 17 is in the queue (RUNNING)"));
  const Said said = birkhoff_says({"cancel", "new"});
  EXPECT_EQ(said.code, 0) << said.err;
  EXPECT_EQ(said.out,
            "job 18: removed from the queue\njob 17: asked to save and end\njob 17: ended\n");
  EXPECT_THAT(calls("scancel"),
              ElementsAre(ElementsAre("18"), ElementsAre("--batch", "--signal=USR2", "17")));
  EXPECT_THAT(birkhoff_says({"cancel", "new"}).out, HasSubstr("has no job in the queue"));
}

TEST_F(SlurmCommands, StatusTellsWhatIsKnown) {
  nlohmann::json known = status("run");
  EXPECT_EQ(known.at("state"), "finished");
  EXPECT_EQ(known.at("step"), 4);
  EXPECT_EQ(known.at("seconds_left"), 0);
  EXPECT_EQ(known.at("checkpoint_step"), 4);
  EXPECT_EQ(known.at("restarts"), 0);
  EXPECT_GT(known.at("effective"), 0);
  EXPECT_TRUE(known.at("squeue_answers")) << "nothing was submitted";
  EXPECT_EQ(submit("run", {"--set", "train.steps=100"}).code, 0);
  write_bytes("queue", "17|PENDING|1:00:00||Resources\n");
  EXPECT_THAT(birkhoff_says({"status", "run"}).out, HasSubstr("17: PENDING, Resources"));
  stubs_->write("squeue", "exit 1");
  EXPECT_FALSE(status("run").at("squeue_answers"));
  EXPECT_THAT(birkhoff_says({"status", "run"}).out, HasSubstr("squeue does not answer"));
  const Said cancelled = birkhoff_says({"cancel", "run"});
  EXPECT_EQ(cancelled.code, 2);
  EXPECT_THAT(cancelled.err, HasSubstr("squeue does not answer"));
}

TEST_F(SlurmCommands, TailPrintsTheNewestLines) {
  Said said = birkhoff_says({"tail", "run", "--lines", "2"});
  EXPECT_EQ(said.code, 0) << said.err;
  EXPECT_THAT(said.out, AllOf(HasSubstr("==> metrics.jsonl <==\nstep 4: loss "),
                              HasSubstr("==> rank-0.log <==\n"), Not(HasSubstr("step 1: loss"))));
  EXPECT_EQ(submit("run", {"--chain", "2"}).code, 0);
  write_bytes("run.slurm/1/17.out", "old\n");
  write_bytes("run.slurm/1/18.out", "one\ntwo\x1b[2J\nthree\nnot yet");
  said = birkhoff_says({"tail", "run", "--lines", "2", "--no-follow"});
  EXPECT_THAT(said.out, AllOf(HasSubstr("==> 18.out <==\ntwo\\x1b[2J\nthree\n"),
                              Not(HasSubstr("old")), Not(HasSubstr("not yet"))));
}

TEST_F(SlurmCommands, FreshMovesTheRunAsideOnce) {
  EXPECT_EQ(submit("run", {"--fresh", "--set", "model.heads=4"}).code, 0);
  EXPECT_TRUE(fs::exists("run/before-fresh-1/run.json"));
  EXPECT_THAT(read_bytes("run.slurm/1/job.sh"), Not(HasSubstr("--fresh")))
      << "a requeued job must continue";
}

TEST_F(SlurmCommands, WarnsIfAStepAndASaveDoNotFit) {
  EXPECT_EQ(submit("run", {"--dry-run"}).err, "");
  std::string status_file = read_bytes("run/status.json");
  const std::string key = "\"save_seconds\":";
  const std::size_t at = status_file.find(key) + key.size();
  status_file.replace(at, status_file.find(',', at) - at, "200");
  write_bytes("run/status.json", status_file);
  EXPECT_THAT(submit("run", {"--dry-run"}).err,
              AllOf(HasSubstr("a step and a save took 200."), HasSubstr("signal_seconds is 120")));
  EXPECT_THAT(submit("run", {"--time", "3", "--dry-run"}).err,
              HasSubstr("the time limit is 180 s: raise --time"));
}

TEST_F(SlurmCommands, WhatSbatchSaysReachesTheUser) {
  stubs_->write("sbatch", "echo 'sbatch: error: invalid partition specified: p' >&2; exit 1");
  const Said said = submit("new");
  EXPECT_EQ(said.code, 2);
  EXPECT_THAT(said.err, HasSubstr("invalid partition specified: p"));
  fs::remove("stubs/sbatch");
  setenv("PATH", (folder_->path() / "scratch/stubs").c_str(), 1);
  EXPECT_THAT(submit("new").err, HasSubstr("sbatch did not take"));
}

// A stub of apptainer starts the program under test as the image's.
TEST_F(SlurmCommands, RanksOfAContainerRunItsBirkhoff) {
  stubs_->write("apptainer", "exec '" + program_path() + "' \"${@:4}\"");
  const Finished trained =
      run_child({.line = birkhoff_line({"train", "good.txtpb", "--run", "boxed", "--ranks", "2",
                                        "--container", "a box.sif"})});
  EXPECT_EQ(trained.code, 0) << trained.err;
  const auto ranks = calls("apptainer");
  ASSERT_EQ(ranks.size(), 2u);
  EXPECT_EQ(std::vector<std::string>(ranks[0].begin(), ranks[0].begin() + 4),
            (std::vector<std::string>{"exec", "a box.sif", "birkhoff", "train"}));
  EXPECT_EQ(status("boxed").at("state"), "finished");
}

}  // namespace
}  // namespace birkhoff
