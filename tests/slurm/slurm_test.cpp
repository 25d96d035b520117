// Faults that jobs of `birkhoff submit` survive: each run must end with the bits of an
// uninterrupted one.
#include <csignal>

#include "slurm_fixture.h"

namespace birkhoff {
namespace {

using testing::HasSubstr;

TEST_F(Slurm, ARunOfTwoNodesFinishes) {
  const std::string name = "a 'run' $(of) %j \"two\" nodes";  // sbatch reads it, too
  const std::vector<std::string> jobs = submit(name, 0, {"--nodes", "2"});
  ASSERT_EQ(jobs.size(), 1u);
  expect_finished(jobs[0], name);
  ASSERT_EQ(history(name).size(), 1u);
  EXPECT_EQ(history(name)[0].start.scheduler_job, "slurm " + jobs[0]);
  EXPECT_THAT(history(name)[0].start.hosts, testing::ElementsAre("node0", "node1"));
  EXPECT_THAT(output(name), HasSubstr("2 ranks on 2 hosts, examined in "));
  EXPECT_THAT(output(name), HasSubstr("job " + jobs[0] + ": the run is finished"));
  EXPECT_EQ(status(name).at("state"), "finished");
  const Finished tail = run_child({.line = birkhoff_line({"tail", run(name).string()})});
  EXPECT_THAT(tail.out, HasSubstr("the run is finished"));
  EXPECT_THAT(tail.out, HasSubstr("step 300: loss "));
}

// A step of two tasks of a job with other options, with variables that sbatch prefers to a script.
TEST_F(Slurm, AJobSubmittedInAStepSeesOnlyItsOwnAllocation) {
  const std::vector<std::string> step = {"env",
                                         "SBATCH_ARRAY_INX=0-1",
                                         "SBATCH_HOLD=1",
                                         "srun",
                                         "--nodes=1",
                                         "--ntasks=2",
                                         "--mem-per-cpu=100",
                                         "bash",
                                         "-c",
                                         "[ $SLURM_PROCID != 0 ] || \"$0\" \"$@\""};
  const std::vector<std::string> jobs =
      submit("in_step", 0, {"--nodes", "3", "--spare-nodes", "1"}, "sbatch: \"--mem=500\"", step);
  ASSERT_EQ(jobs.size(), 1u);
  expect_finished(jobs[0], "in_step");
  EXPECT_EQ(history("in_step")[0].start.scheduler_job, "slurm " + jobs[0]);
  EXPECT_THAT(history("in_step")[0].start.hosts, testing::ElementsAre("node0", "node1"));
}

// The job has another step, such as a shell.
TEST_F(Slurm, ALostRankIsStartedAgainInTheSameJob) {
  const std::string job = submit("lost_rank", kReadMs, {"--nodes", "2"})[0];
  ASSERT_TRUE(wait_for_step_70("lost_rank")) << output("lost_rank");
  Child shell({.line = {"srun", "--jobid=" + job, "--overlap", "--nodes=1", "--ntasks=1",
                        "--mpi=none", "--job-name=shell", "sleep", "600"}});
  const auto has_shell = [&] {
    return run_child({.line = {"squeue", "--steps", "--noheader", "--format=%j"}})
               .out.find("shell\n") != std::string::npos;
  };
  for (int wait = 0; !has_shell() && wait < 100; ++wait) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  const pid_t rank = process_of_task(run("lost_rank"), 1);
  ASSERT_GT(rank, 0);
  kill(rank, SIGKILL);
  for (int wait = 0; history("lost_rank").size() < 2 && wait < 600; ++wait) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  EXPECT_TRUE(has_shell()) << "a restart ended a step that is not of its ranks";
  release();
  expect_finished(job, "lost_rank");
  EXPECT_EQ(field(job, "Restarts"), "0") << "it went back to the queue";
  EXPECT_EQ(history("lost_rank").size(), 2u) << output("lost_rank");
  expect_only_unsaved_steps_lost("lost_rank");
  EXPECT_EQ(status("lost_rank").at("restarts"), 1);
}

TEST_F(Slurm, ASpareNodeReplacesALostOne) {
  const std::string job = submit("lost_node", kReadMs, {"--nodes", "3", "--spare-nodes", "1"})[0];
  ASSERT_TRUE(wait_for_step_70("lost_node")) << output("lost_node");
  const Finished killed = run_child({.line = {SLURM_CLUSTER, "kill", cluster_, "1"}});
  EXPECT_EQ(killed.code, 0) << killed.err;
  release();
  expect_finished(job, "lost_node");
  ASSERT_EQ(history("lost_node").size(), 2u) << output("lost_node");
  EXPECT_EQ(history("lost_node")[1].start.ranks, 2);
  expect_only_unsaved_steps_lost("lost_node");
  EXPECT_EQ(field(job, "Restarts"), "0") << "it went back to the queue: " << output("lost_node");
  const Finished revived = run_child({.line = {SLURM_CLUSTER, "revive", cluster_, "1"}});
  EXPECT_EQ(revived.code, 0) << revived.err;
}

TEST_F(Slurm, ARequeuedJobResumes) {
  const std::string job = submit("requeued", kReadMs, {"--nodes", "2"})[0];
  ASSERT_TRUE(wait_for_step_70("requeued")) << output("requeued");
  EXPECT_EQ(status("requeued").at("state"), "running");
  EXPECT_EQ(run_child({.line = {"scontrol", "requeue", job}}).code, 0);
  release();
  expect_finished(job, "requeued");
  expect_no_step_lost("requeued");
  EXPECT_EQ(field(job, "Restarts"), "1");
}

TEST_F(Slurm, APreemptedJobSavesAndResumes) {
  const std::string job = submit("preempted", kReadMs, {"--nodes", "4", "--spare-nodes", "2"})[0];
  ASSERT_TRUE(wait_for_step_70("preempted")) << output("preempted");
  const Finished urgent =
      run_child({.line = {"sbatch", "--parsable", "--partition=urgent", "--nodes=4", "--exclusive",
                          "--output=/dev/null", "--wrap=true"}});
  EXPECT_EQ(urgent.code, 0) << urgent.err;
  EXPECT_TRUE(wait_for_end_of_job("preempted"));
  release();
  EXPECT_TRUE(wait_for_state(urgent.out.substr(0, urgent.out.find('\n')), "COMPLETED"));
  expect_finished(job, "preempted");
  expect_no_step_lost("preempted");
  ASSERT_EQ(history("preempted").size(), 2u) << output("preempted");
  EXPECT_EQ(history("preempted")[0].end->code, 75);
}

// Slurm's shortest limit is a minute. It looks at limits twice a minute, and asks up to half a
// minute early.
TEST_F(Slurm, BeforeItsTimeLimitAJobSavesAndGoesBackToTheQueue) {
  constexpr int kMinutes = kSanitized ? 3 : 1;  // sanitized programs start slowly
  const std::string job =
      submit("limit", 3 * kMinutes * kReadMs, {"--nodes", "2", "--time", std::to_string(kMinutes)},
             "signal_seconds: 20")[0];
  EXPECT_TRUE(wait_for_end_of_job("limit", seconds(120 * kMinutes))) << output("limit");
  release();
  expect_finished(job, "limit");
  expect_no_step_lost("limit");
  EXPECT_NE(field(job, "Restarts"), "0");
  EXPECT_THAT(output("limit"), HasSubstr("saved; goes back to the queue"));
}

}  // namespace
}  // namespace birkhoff
