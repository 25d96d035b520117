// Training under a real Slurm of four nodes on this machine (slurm_cluster). Needs root and Slurm's
// packages; skipped, by name, without them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "runtime/checkpoint/run_folder.h"
#include "runtime/reporting/run_history.h"
#include "tests/launcher/train_process_fixture.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using std::chrono::seconds;
using testing::HasSubstr;

constexpr int kNodes = 4;

std::string without_newline(std::string text) {
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

// The process of a task of a step that trains in the run; -1 if there is none.
pid_t process_of_task(const fs::path& run, int task) {
  const std::string wanted = "SLURM_PROCID=" + std::to_string(task);
  for (const pid_t process : processes_of(run)) {
    const std::string environment =
        '\0' + read_bytes("/proc/" + std::to_string(process) + "/environ");
    const auto has = [&](const std::string& variable) {
      return environment.find('\0' + variable) != std::string::npos;
    };
    if (has("SLURM_STEP_NUM_TASKS=") && has(wanted + '\0')) return process;
  }
  return -1;
}

class Slurm : public TrainProcess {
 protected:
  static bool is_possible() {
    return geteuid() == 0 && run_child({.line = {"slurmctld", "-V"}}).code == 0 &&
           run_child({.line = {"munged", "-V"}}).code == 0;
  }

  static void SetUpTestSuite() {
    if (!is_possible()) return;
    TrainProcess::SetUpTestSuite();
    cluster_ = (folder_->path() / "slurm").string();
    const Finished started = run_child({.line = {SLURM_CLUSTER, "start", cluster_, "4"}});
    ASSERT_EQ(started.code, 0) << started.err;
    setenv("SLURM_CONF", (cluster_ + "/slurm.conf").c_str(), 1);
    unsetenv("OMP_NUM_THREADS");
  }
  static void TearDownTestSuite() {
    if (folder_ == nullptr) return;
    run_child({.line = {SLURM_CLUSTER, "stop", cluster_}});
    unsetenv("SLURM_CONF");
    TrainProcess::TearDownTestSuite();
  }

  void SetUp() override {
    if (folder_ == nullptr) GTEST_SKIP() << "needs root, slurm-wlm, slurm-wlm-basic-plugins, munge";
  }
  void TearDown() override {
    if (folder_ == nullptr) return;
    run_child({.line = {"scancel", "--user=root"}});
    for (int wait = 0; wait < 300 && !run_child({.line = {"squeue", "-h"}}).out.empty(); ++wait) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    TrainProcess::TearDown();
  }

  // Submits a job of `nodes` nodes that trains in run(name); returns its id. It is requeued if it
  // ends with 75.
  static std::string submit(const std::string& name, int nodes, const std::string& train_options,
                            const std::vector<std::string>& options = {}) {
    const fs::path script = folder_->path() / (name + ".sh");
    write_bytes(
        script.string(),
        "#!/bin/bash\n"
        "export OMP_NUM_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1\n" +
            program_path() + " train tiny.txtpb --run " + run(name).string() + " " + train_options +
            " &\n"
            "child=$!\n"
            "trap 'kill -USR1 $child' USR1 TERM\n"
            "wait $child; code=$?\n"
            "while kill -0 $child 2>/dev/null; do wait $child; code=$?; done\n"
            "[ $code != 75 ] || scontrol requeue $SLURM_JOB_ID\n"
            "exit $code\n");
    std::vector<std::string> line = {"sbatch",
                                     "--parsable",
                                     "--nodes=" + std::to_string(nodes),
                                     "--ntasks-per-node=2",
                                     "--no-kill",
                                     "--requeue",
                                     "--open-mode=append",
                                     "--output=" + (folder_->path() / (name + ".out")).string()};
    line.insert(line.end(), options.begin(), options.end());
    line.push_back(script.string());
    const Finished submitted = run_child({.line = line});
    EXPECT_EQ(submitted.code, 0) << submitted.err;
    return without_newline(submitted.out);
  }

  static std::string output(const std::string& name) {
    const std::string file = (folder_->path() / (name + ".out")).string();
    return fs::exists(file) ? read_bytes(file) : "it has printed nothing";
  }

  // A field of `scontrol show job`, such as JobState.
  static std::string field(const std::string& job, const std::string& name) {
    const Finished shown = run_child({.line = {"scontrol", "show", "job", "-o", job}});
    const std::size_t at = shown.out.find(" " + name + "=");
    if (at == std::string::npos) return "";
    const std::size_t begin = at + name.size() + 2;
    return shown.out.substr(begin, shown.out.find_first_of(" \n", begin) - begin);
  }

  static bool wait_for_state(const std::string& job, const std::string& state,
                             seconds limit = seconds(180)) {
    const auto deadline = std::chrono::steady_clock::now() + limit;
    while (field(job, "JobState") != state) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
    }
    return true;
  }

  // Waits until the job has done step 70 and saved step 50.
  static bool wait_for_step_70(const std::string& name, seconds limit = seconds(120)) {
    const auto deadline = std::chrono::steady_clock::now() + limit;
    while (last_step(run(name)) < 70 || !fs::exists(run(name) / "checkpoints" / "step-00000050")) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    return true;
  }

  // Expects that the job ended well and that the run has the bits of an uninterrupted one.
  static void expect_finished(const std::string& job, const std::string& name) {
    EXPECT_TRUE(wait_for_state(job, "COMPLETED")) << field(job, "JobState") << '\n' << output(name);
    expect_like_reference(name);
  }

  static std::vector<Job> history(const std::string& name) {
    return read_history(RunPaths{run(name)}.history());
  }

  static inline std::string cluster_;
};

TEST_F(Slurm, AJobOfTwoNodesFinishes) {
  const std::string job = submit("two_nodes", 2, "--ranks 2");
  expect_finished(job, "two_nodes");
  ASSERT_EQ(history("two_nodes").size(), 1u);
  EXPECT_EQ(history("two_nodes")[0].start.scheduler_job, "slurm " + job);
}

TEST_F(Slurm, ALostRankIsStartedAgainInTheSameJob) {
  const std::string job = submit("lost_rank", 2, "--ranks 2 --restarts 1");
  ASSERT_TRUE(wait_for_step_70("lost_rank")) << output("lost_rank");
  const pid_t rank = process_of_task(run("lost_rank"), 1);
  ASSERT_GT(rank, 0);
  kill(rank, SIGKILL);
  expect_finished(job, "lost_rank");
  EXPECT_EQ(field(job, "Restarts"), "0") << "it never left the queue";
  ASSERT_EQ(history("lost_rank").size(), 2u) << output("lost_rank");
  EXPECT_EQ(history("lost_rank")[1].start.step, 50);
}

TEST_F(Slurm, ASpareNodeReplacesALostOne) {
  const std::string job = submit("lost_node", 3, "--ranks 2 --restarts 1 --spare-nodes 1");
  ASSERT_TRUE(wait_for_step_70("lost_node")) << output("lost_node");
  const Finished killed = run_child({.line = {SLURM_CLUSTER, "kill", cluster_, "1"}});
  EXPECT_EQ(killed.code, 0) << killed.err;
  expect_finished(job, "lost_node");
  ASSERT_EQ(history("lost_node").size(), 2u) << output("lost_node");
  EXPECT_EQ(history("lost_node")[1].start.ranks, 2);
  run_child({.line = {SLURM_CLUSTER, "revive", cluster_, "1"}});
}

TEST_F(Slurm, ARequeuedJobResumes) {
  const std::string job = submit("requeued", 2, "--ranks 2");
  ASSERT_TRUE(wait_for_step_70("requeued")) << output("requeued");
  EXPECT_EQ(run_child({.line = {"scontrol", "requeue", job}}).code, 0);
  expect_finished(job, "requeued");
  EXPECT_EQ(field(job, "Restarts"), "1");
}

TEST_F(Slurm, APreemptedJobSavesAndResumes) {
  const std::string job = submit("preempted", kNodes, "--ranks 2");
  ASSERT_TRUE(wait_for_step_70("preempted")) << output("preempted");
  const Finished urgent =
      run_child({.line = {"sbatch", "--parsable", "--partition=urgent", "--nodes=4", "--exclusive",
                          "--output=/dev/null", "--wrap=true"}});
  EXPECT_EQ(urgent.code, 0) << urgent.err;
  EXPECT_TRUE(wait_for_state(without_newline(urgent.out), "COMPLETED"));
  expect_finished(job, "preempted");
  const std::vector<Job> jobs = history("preempted");
  ASSERT_EQ(jobs.size(), 2u) << output("preempted");
  ASSERT_TRUE(jobs[0].end);
  EXPECT_EQ(jobs[0].end->code, 75);
  EXPECT_EQ(jobs[0].end->step, jobs[1].start.step) << "no step is done again";
}

}  // namespace
}  // namespace birkhoff
