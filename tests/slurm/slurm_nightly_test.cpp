// Tests that take minutes: arrays, chains, time limits without a warning, and canceled runs.
#include "launcher/slurm/batch_script.h"
#include "slurm_fixture.h"

namespace birkhoff {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

class SlurmNightly : public Slurm {};

TEST_F(SlurmNightly, AnArrayOfFourRunsEach) {
  const std::vector<std::string> jobs =
      submit("sweep", 2, {"--nodes", "2", "--sweep", "train.seed=1,2,3,4"});
  ASSERT_EQ(jobs.size(), 4u);
  for (const std::string& job : jobs) {
    EXPECT_TRUE(wait_for_state(job, "COMPLETED")) << output("sweep");
  }
  for (const std::string seed : {"1", "2", "3", "4"}) {
    const Finished trained =
        run_child(train("seed" + seed, {"--ranks", "2", "--set", "train.seed=" + seed}));
    EXPECT_EQ(trained.code, 0) << trained.err;
    expect_like_reference("sweep/" + seed, "seed" + seed);
  }
}

// On four nodes, and on three of them from the loss of one on.
TEST_F(SlurmNightly, OnFewerNodesARunHasTheSameBits) {
  const std::vector<std::string> invariant = {"--set", "train.invariant.shards=12", "--set",
                                              "train.global_batch=12"};
  std::vector<std::string> options = {"--ranks", "1"};
  options.insert(options.end(), invariant.begin(), invariant.end());
  const Finished trained = run_child(train("one_rank", options));
  ASSERT_EQ(trained.code, 0) << trained.err;
  options = {"--nodes", "4", "--min-ranks", "3"};
  options.insert(options.end(), invariant.begin(), invariant.end());
  const std::string job = submit("fewer", kReadMs, options)[0];
  ASSERT_TRUE(wait_for_step_70("fewer")) << output("fewer");
  EXPECT_EQ(run_child({.line = {SLURM_CLUSTER, "kill", cluster_, "1"}}).code, 0);
  release();
  EXPECT_TRUE(wait_for_state(job, "COMPLETED")) << output("fewer");
  EXPECT_EQ(run_child({.line = {SLURM_CLUSTER, "revive", cluster_, "1"}}).code, 0);
  EXPECT_EQ(field(job, "Restarts"), "0") << output("fewer");
  ASSERT_EQ(history("fewer").size(), 2u) << output("fewer");
  EXPECT_EQ(history("fewer")[0].start.ranks, 4);
  EXPECT_EQ(history("fewer")[1].start.ranks, 3);
  expect_only_unsaved_steps_lost("fewer");
  expect_metrics_like("fewer", "one_rank");
}

TEST_F(SlurmNightly, FourNodesFinishARun) {
  const std::string batch = "train.global_batch=8";
  const Finished trained = run_child(train("four_ranks", {"--ranks", "4", "--set", batch}));
  ASSERT_EQ(trained.code, 0) << trained.err;
  const std::string job = submit("four", 0, {"--nodes", "4", "--set", batch})[0];
  EXPECT_TRUE(wait_for_state(job, "COMPLETED")) << output("four");
  expect_like_reference("four", "four_ranks");
}

// One of them has the id of the whole array.
TEST_F(SlurmNightly, AnElementThatIsStartedAgainLeavesTheOthersAlone) {
  const std::vector<std::string> jobs =
      submit("array", kReadMs, {"--nodes", "2", "--sweep", "train.seed=1,2"});
  ASSERT_EQ(jobs.size(), 2u);
  for (const char* name : {"array/1", "array/2"}) {
    ASSERT_TRUE(wait_for_step_70(name)) << output("array");
  }
  for (const char* name : {"array/1", "array/2"}) {
    const pid_t process = process_of_task(run(name), 1);
    ASSERT_GT(process, 0);
    kill(process, SIGKILL);
    for (int wait = 0; history(name).size() < 2 && wait < 600; ++wait) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    EXPECT_EQ(history("array/1").size(), 2u) << output("array");
    EXPECT_EQ(history("array/2").size(), name == std::string("array/1") ? 1u : 2u);
  }
  release();
  for (const std::string& job : jobs) EXPECT_TRUE(wait_for_state(job, "COMPLETED"));
  expect_like_reference("array/1");
}

TEST_F(SlurmNightly, AChainContinuesARunThatMayNotBeRequeued) {
  const std::vector<std::string> jobs =
      submit("chain", 60, {"--nodes", "2", "--time", "1", "--chain", "3"},
             "requeue: false signal_seconds: 20");
  ASSERT_EQ(jobs.size(), 3u);
  EXPECT_TRUE(wait_for_end_of_job("chain")) << output("chain");
  release();
  EXPECT_FALSE(wait_for_state(jobs[0], "COMPLETED")) << "it was saved, and ended with 75";
  for (const std::string& job : jobs) {
    wait_for_state(job, "COMPLETED");
    EXPECT_EQ(field(job, "Restarts"), "0");
  }
  expect_like_reference("chain");
  expect_no_step_lost("chain");
  EXPECT_EQ(field(jobs[2], "JobState"), "COMPLETED") << output("chain");
}

TEST_F(SlurmNightly, AFinishedRunEndsTheRestOfItsChain) {
  const std::vector<std::string> jobs = submit("short", 0, {"--nodes", "2", "--chain", "3"});
  for (const std::string& job : jobs) EXPECT_TRUE(wait_for_state(job, "COMPLETED"));
  expect_like_reference("short");
}

TEST_F(SlurmNightly, WithoutASignalAJobSavesBeforeItsTimeLimit) {
  const std::string job =
      submit("unwarned", 120, {"--nodes", "2", "--time", "1"}, "signal_seconds: 0")[0];
  EXPECT_TRUE(wait_for_end_of_job("unwarned")) << output("unwarned");
  release();
  expect_finished(job, "unwarned");
  expect_no_step_lost("unwarned");
  EXPECT_THAT(history("unwarned")[0].end->reason, HasSubstr("time limit is near"));
  EXPECT_THAT(output("unwarned"), Not(HasSubstr("DUE TO TIME LIMIT")));
}

// The ranks learn of no limit. Slurm ends the job at its limit by SIGTERM, and leaves it KillWait
// to save.
TEST_F(SlurmNightly, AtATimeLimitWithoutAWarningAJobSaves) {
  const std::filesystem::path programs = folder_->path() / "programs";
  std::filesystem::create_directories(programs);
  write_bytes((programs / "squeue").string(),
              "#!/bin/bash\n[[ \"$*\" != *=%L ]] || exit 1\nPATH=${PATH#*:} exec squeue \"$@\"\n");
  std::filesystem::permissions(programs / "squeue", std::filesystem::perms::owner_all);
  const std::string job = submit("sudden", 120, {"--nodes", "2", "--time", "1"},
                                 "signal_seconds: 0 environment: \"PATH=" + programs.string() +
                                     ":" + std::getenv("PATH") + "\"")[0];
  EXPECT_TRUE(wait_for_end_of_job("sudden")) << output("sudden");
  release();
  expect_finished(job, "sudden");
  expect_no_step_lost("sudden");
  EXPECT_NE(field(job, "Restarts"), "0") << output("sudden");
  EXPECT_THAT(output("sudden"), HasSubstr("DUE TO TIME LIMIT"));
}

TEST_F(SlurmNightly, ACancelledRunIsSavedAndContinues) {
  const std::string job = submit("cancelled", 20, {"--nodes", "2", "--chain", "2"})[0];
  ASSERT_TRUE(wait_for_step_70("cancelled")) << output("cancelled");
  const Finished cancelled =
      run_child({.line = birkhoff_line({"cancel", run("cancelled").string()})});
  EXPECT_EQ(cancelled.code, 0) << cancelled.err;
  EXPECT_THAT(cancelled.out, HasSubstr("job " + job + ": asked to save and end"));
  EXPECT_EQ(run_child({.line = {"squeue", "-h"}}).out, "");
  EXPECT_THAT(output("cancelled"), HasSubstr("saved; canceled"));
  EXPECT_THAT(output("cancelled"), Not(HasSubstr("goes back")));
  EXPECT_EQ(status("cancelled").at("state"), "stopped");
  const std::vector<std::string> jobs = submit("cancelled", 0, {"--nodes", "2"});
  expect_finished(jobs.back(), "cancelled");
  expect_no_step_lost("cancelled");
}

// sbatch hands the script the variables of the step that it is called in.
TEST_F(SlurmNightly, AUsersBatchScriptThatWasQueuedInAStepStartsItsRanks) {
  std::string line = "OMP_NUM_THREADS=1";
  for (const std::string& word :
       birkhoff_line({"train", "tiny.txtpb", "--run", run("queued").string(), "--ranks", "2"})) {
    line += ' ' + shell_quoted(word);
  }
  const Finished step =
      run_child({.line = {"srun", "--nodes=1", "--ntasks=2", "bash", "-c",
                          "[ $SLURM_PROCID != 0 ] || sbatch --wait --nodes=2 --ntasks-per-node=1 "
                          "--output=queued.out --wrap=\"$0\"",
                          line}});
  EXPECT_EQ(step.code, 0) << step.err << read_bytes("queued.out");
  ASSERT_EQ(history("queued").size(), 1u);
  EXPECT_THAT(history("queued")[0].start.hosts, ElementsAre("node0", "node1"));
}

TEST_F(SlurmNightly, MpirunStartsTheRanksWhereSlurmHasNoPmix) {
  const std::string job = submit("mpirun", 0, {"--nodes", "2"}, "launcher: mpirun")[0];
  expect_finished(job, "mpirun");
  EXPECT_THAT(history("mpirun")[0].start.hosts, ElementsAre("node0", "node1"));
}

// The names are those that sbatch --exclude takes.
TEST_F(SlurmNightly, DoctorExaminesTheNodesOfAJob) {
  const std::string report = (folder_->path() / "doctor.json").string();
  std::string line;
  for (const std::string& word :
       birkhoff_line({"doctor", "--ranks", "3", "--no-speed", "--json", report})) {
    line += shell_quoted(word) + ' ';
  }
  const Finished job =
      run_child({.line = {"sbatch", "--parsable", "--wait", "--nodes=3", "--ntasks-per-node=1",
                          "--output=/dev/null", "--wrap=" + line}});
  EXPECT_EQ(job.code, 0) << job.err;
  const auto json = nlohmann::json::parse(read_bytes(report));
  EXPECT_EQ(json.at("hosts"), nlohmann::json({"node0", "node1", "node2"}));
  EXPECT_EQ(json.at("ranks"), 3);
}

}  // namespace
}  // namespace birkhoff
