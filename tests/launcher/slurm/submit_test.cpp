// `submit`, `status`, `tail` and `cancel` with stubs of Slurm's commands in PATH. Under a real
// Slurm: tests/slurm.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "cluster/base/files/file.h"
#include "configs/loader/config_io.h"
#include "launcher/slurm/run_jobs.h"
#include "tests/launcher/bad_input/damage.h"
#include "tests/launcher/bad_input/good_input.h"
#include "tests/launcher/child.h"
#include "tests/launcher/said.h"
#include "tests/launcher/slurm/stub_programs.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

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
    stubs_->write(
        "sbatch",
        "[ \"$1\" = --test-only ] || { n=$(wc -l <ids); echo $((n + 17)) | tee -a ids; }");
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
                                   "--min-ranks", "2", "--time", "2-00", "--dry-run"});
  EXPECT_EQ(said.code, 0) << said.err;
  EXPECT_THAT(said.out, AllOf(HasSubstr("#SBATCH --job-name=new\n"), HasSubstr("--nodes=3\n"),
                              HasSubstr("--ntasks-per-node=2\n"), HasSubstr("--time=2-00\n"),
                              HasSubstr("--partition=p\n")));
  EXPECT_THAT(said.out, HasSubstr("options=(\n  '--ranks'\n  '4'\n  '--restarts'\n  '7'\n"
                                  "  '--spare-nodes'\n  '1'\n  '--min-ranks'\n  '2')\n"));
  EXPECT_THAT(said.out, HasSubstr("examine=(\n  '--ranks'\n  '6'\n  '--no-speed'\n"));
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
  write_bytes("new.slurm/1/17.end", "4 failed with exit code 4\n");
  EXPECT_EQ(status("new").at("state"), "failed") << "before it began to train";
  EXPECT_THAT(status("new").at("reason").get<std::string>(),
              AllOf(HasSubstr("job 17: failed with exit code 4"), HasSubstr("1/17.out")));
}

// sbatch hands its environment to the job, and prefers its own variables to the script.
TEST_F(SlurmCommands, AJobGetsNothingOfTheJobThatSubmitsIt) {
  stubs_->write("sbatch", "env >environment; echo 17");
  const std::vector<std::string> of_caller = {
      "SLURM_JOB_ID",      "SLURM_STEP_NUM_TASKS", "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT",
      "SLURM_MEM_PER_CPU", "SLURMD_NODENAME",      "SRUN_CPUS_PER_TASK",  "PMIX_RANK",
      "SBATCH_ARRAY_INX",  "SBATCH_TIMELIMIT"};
  const std::vector<std::string> of_user = {"SLURM_CONF",     "SLURM_JWT",    "SLURM_CLUSTERS",
                                            "SBATCH_ACCOUNT", "PMIX_MCA_gds", "OMP_X"};
  for (const auto& names : {of_caller, of_user}) {
    for (const std::string& name : names) setenv(name.c_str(), "9", 1);
  }
  const Said said = submit("new");
  for (const auto& names : {of_caller, of_user}) {
    for (const std::string& name : names) unsetenv(name.c_str());
  }
  EXPECT_EQ(said.code, 0) << said.err;
  EXPECT_THAT(said.err, HasSubstr("warning: SBATCH_ARRAY_INX, SBATCH_TIMELIMIT: not passed on"));
  const std::string environment = '\n' + read_bytes("environment");
  for (const std::string& name : of_caller) {
    EXPECT_THAT(environment, Not(HasSubstr('\n' + name + '=')));
  }
  for (const std::string& name : of_user) {
    EXPECT_THAT(environment, HasSubstr('\n' + name + "=9\n"));
  }
  EXPECT_EQ(submit("second").err, "") << "nothing to warn of";
}

TEST_F(SlurmCommands, AChainWaitsForTheJobBefore) {
  EXPECT_EQ(submit("new", {"--chain", "3"}).code, 0);
  const auto lines = calls("sbatch");
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_EQ(lines[0].size(), 2u);
  const std::string script = absolute("new.slurm/1/job.sh");
  EXPECT_THAT(lines[1], ElementsAre("--parsable", "--dependency=afterany:17", script, "17"));
  EXPECT_THAT(lines[2], ElementsAre("--parsable", "--dependency=afterany:18", script, "18"));
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
  EXPECT_EQ(submit("new", {"--chain", "3"}).code, 0);
  // A suspended job has steps that are not saved; here it continues after the first look.
  stubs_->write("squeue", "cat queue; sed -i s/SUSPENDED/RUNNING/ queue");
  write_bytes(
      "queue",
      "17|RUNNING|50:00|n0|None\n19|SUSPENDED|50:00|n0|None\n18|PENDING|1:00:00||Dependency\n"
      "99|RUNNING|1:00:00|n1|None\n");
  EXPECT_THAT(submit("new").err, HasSubstr("its job 17 is in the queue (RUNNING)"));
  const Said said = birkhoff_says({"cancel", "new"});
  EXPECT_EQ(said.code, 0) << said.err;
  EXPECT_EQ(said.out,
            "job 18: removed from the queue\njob 17: asked to save and end\n"
            "job 19: asked to save and end\njob 17: ended\njob 19: ended\n");
  EXPECT_THAT(calls("scancel"),
              ElementsAre(ElementsAre("18"), ElementsAre("--batch", "--signal=USR2", "17"),
                          ElementsAre("--batch", "--signal=USR2", "19")));
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

TEST_F(SlurmCommands, FreshMovesNothingIfSbatchRefuses) {
  stubs_->write("sbatch", "echo 'no such partition' >&2; exit 1");
  const Said said = submit("run", {"--fresh", "--set", "model.heads=4"});
  EXPECT_EQ(said.code, 2);
  EXPECT_THAT(said.err, HasSubstr("no such partition"));
  EXPECT_FALSE(fs::exists("run/before-fresh-1"));
  EXPECT_FALSE(fs::exists("run.slurm/1"));
}

TEST_F(SlurmCommands, FreshMovesNoRunOfASweepIfOneIsInUse) {
  for (const std::string run : {"sweep/2", "sweep/4"}) {
    fs::create_directories(run);
    fs::copy("run", run, fs::copy_options::recursive);
  }
  const FileLock lock("sweep/4/lock", "the run");
  const Said said = submit("sweep", {"--fresh", "--sweep", "model.heads=2,4"});
  EXPECT_EQ(said.code, 2);
  EXPECT_THAT(said.err, HasSubstr("sweep/4 is in use by process"));
  EXPECT_FALSE(fs::exists("sweep/2/before-fresh-1"));
  EXPECT_FALSE(fs::exists("sweep.slurm/1"));
}

TEST_F(SlurmCommands, ASilentQueueIsNotAnEmptyOne) {
  EXPECT_EQ(submit("new").code, 0);
  stubs_->write("squeue", "exit 1");
  const Said said = submit("new");
  EXPECT_EQ(said.code, 2);
  EXPECT_THAT(said.err, HasSubstr("squeue does not answer"));
  EXPECT_EQ(calls("sbatch").size(), 1u);
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

TEST_F(SlurmCommands, ARunThatDoesNotFitTheMemoryIsRefused) {
  const std::string site = read_bytes("site.txtpb");
  write_bytes("site.txtpb", site + " rank_memory_gb: 1e-6");
  const Said said = submit("new");
  EXPECT_EQ(said.code, 3);
  EXPECT_THAT(said.err, AllOf(HasSubstr("a rank needs"), HasSubstr("has 1e-06")));
  EXPECT_THAT(calls("sbatch"), ElementsAre());
  write_bytes("site.txtpb", site + " rank_memory_gb: 1");
  EXPECT_EQ(submit("new").code, 0);
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
