// Runs that `birkhoff submit` queues in a real Slurm of four nodes on this machine (slurm_cluster).
// Needs root and Slurm's packages; skipped, by name, without them.
#pragma once

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "launcher/slurm/run_jobs.h"
#include "runtime/checkpoint/run_folder.h"
#include "runtime/reporting/run_history.h"
#include "tests/launcher/processes/train_process_fixture.h"
#include "tests/sanitized.h"

namespace birkhoff {

class Slurm : public TrainProcess {
 protected:
  using Clock = std::chrono::steady_clock;
  using seconds = std::chrono::seconds;
  static constexpr int kReadMs = 20;  // a step then takes 0.06 s
  // Ranks start in about 2 s. Rarely, they never do: in a step on some of the job's nodes, Slurm
  // 22.05 sends a request of direct modex to the wrong node (pmixp_dmdx_get).
  static constexpr int kLaunchSeconds = kSanitized ? 120 : 40;

  static bool is_possible() {
    return geteuid() == 0 && run_child({.line = {"slurmctld", "-V"}}).code == 0 &&
           run_child({.line = {"munged", "-V"}}).code == 0 &&
           run_child({.line = {"unshare", "-m", "true"}}).code == 0;  // root of a container may not
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
    if (testing::UnitTest::GetInstance()->current_test_suite()->failed_test_count() > 0)
      keep_logs();
    run_child({.line = {SLURM_CLUSTER, "stop", cluster_}});
    unsetenv("SLURM_CONF");
    TrainProcess::TearDownTestSuite();
    folder_ = nullptr;
  }

  void SetUp() override {
    if (folder_ == nullptr)
      GTEST_SKIP() << "needs root that may mount, slurm-wlm, slurm-wlm-basic-plugins, "
                      "munge";
    std::filesystem::remove(folder_->path() / "fast");
  }
  void TearDown() override {
    if (folder_ == nullptr) return;
    run_child({.line = {"scancel", "--user=root"}});
    for (int wait = 0; wait < 300 && !run_child({.line = {"squeue", "-h"}}).out.empty(); ++wait) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    TrainProcess::TearDown();
  }

  // Submits tiny.txtpb in run(name) by the profile `site`, with further options. Returns the jobs.
  // Until release(), every read of the corpus takes read_ms longer, so that whatever happens to
  // a job happens in the middle of its run. `before`: words before the command line, such as srun.
  static std::vector<std::string> submit(const std::string& name, int read_ms,
                                         const std::vector<std::string>& options,
                                         const std::string& site = "",
                                         const std::vector<std::string>& before = {}) {
    std::string text = fmt::format("{}\nlaunch_seconds: {}\n", site, kLaunchSeconds);
    for (const std::string& variable :
         {std::string("OMP_NUM_THREADS=1"), std::string("LD_PRELOAD=" SLOW_READS),
          "BIRKHOFF_SLOW_READS=" + std::to_string(read_ms),
          "BIRKHOFF_FAST_READS=" + (folder_->path() / "fast").string()}) {
      text += "environment: \"" + variable + "\"\n";
    }
    write_bytes((folder_->path() / "site.txtpb").string(), text);
    std::vector<std::string> line = {"submit", "tiny.txtpb", "--run", run(name).string(),
                                     "--site", "site.txtpb", "--set", "data.prefetch=1"};
    line.insert(line.end(), options.begin(), options.end());
    line = birkhoff_line(line);
    line.insert(line.begin(), before.begin(), before.end());
    const Finished submitted = run_child({.line = line});
    EXPECT_EQ(submitted.code, 0) << submitted.err;
    std::vector<std::string> ids;
    for (const SubmittedJob& job : submitted_jobs(run(name))) ids.push_back(job.id);
    return ids;
  }
  // From now on nothing of this test is slow.
  static void release() { write_bytes((folder_->path() / "fast").string(), ""); }

  // The process of a task of a step that trains in the run; -1 if there is none.
  static pid_t process_of_task(const std::filesystem::path& run, int task) {
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

  // What the run's jobs have printed, without a line for each step.
  static std::string output(const std::string& name) {
    std::string text;
    for (const SubmittedJob& job : submitted_jobs(run(name))) {
      std::ifstream lines(job.output);
      for (std::string line; std::getline(lines, line);) {
        if (line.find(" info: step ") == std::string::npos) text += line + '\n';
      }
    }
    return text;
  }

  // A field of `scontrol show job`, such as JobState.
  static std::string field(const std::string& job, const std::string& name) {
    const Finished shown = run_child({.line = {"scontrol", "show", "job", "-o", job}});
    const std::size_t at = shown.out.find(" " + name + "=");
    if (at == std::string::npos) return "";
    const std::size_t begin = at + name.size() + 2;
    return shown.out.substr(begin, shown.out.find_first_of(" \n", begin) - begin);
  }

  // Waits for the state; gives up at another one that a job does not leave. (It may go back to the
  // queue after a TIMEOUT.)
  static bool wait_for_state(const std::string& job, const std::string& state,
                             seconds limit = seconds(180)) {
    const auto deadline = Clock::now() + limit;
    for (;;) {
      const std::string now = field(job, "JobState");
      if (now == state) return true;
      const bool final = now == "COMPLETED" || now == "FAILED" || now == "CANCELLED";
      if (final || Clock::now() > deadline) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
    }
  }

  // Waits until the run has done step 70 and saved step 50.
  static bool wait_for_step_70(const std::string& name) {
    const auto deadline = Clock::now() + seconds(120);
    while (last_step(run(name)) < 70 ||
           !std::filesystem::exists(run(name) / "checkpoints/step-00000050")) {
      if (Clock::now() > deadline) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    return true;
  }

  // Waits until a job that trained in the run has noted its end.
  static bool wait_for_end_of_job(const std::string& name, seconds limit = seconds(120)) {
    const auto deadline = Clock::now() + limit;
    for (std::vector<Job> jobs; jobs.empty() || !jobs.front().end; jobs = history(name)) {
      if (Clock::now() > deadline) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
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
  // Expects that the second job went on from a checkpoint at most one interval and one step before
  // the end of the first.
  static void expect_only_unsaved_steps_lost(const std::string& name) {
    const std::vector<Job> jobs = history(name);
    ASSERT_GE(jobs.size(), 2u);
    EXPECT_GE(jobs[1].start.step, 50) << "wait_for_step_70() saw its checkpoint";
    EXPECT_GT(jobs[1].start.step, jobs[0].end->step - 100) << output(name);
  }
  // Expects that no step was done again.
  static void expect_no_step_lost(const std::string& name) {
    const std::vector<Job> jobs = history(name);
    EXPECT_EQ(totals_of(jobs, std::nullopt, unix_seconds()).lost_steps, 0) << output(name);
  }

  static nlohmann::json status(const std::string& name) {
    const Finished said =
        run_child({.line = birkhoff_line({"status", run(name).string(), "--json"})});
    EXPECT_EQ(said.code, 0) << said.err;
    return nlohmann::json::parse(said.out);
  }

  // Keeps what shows why a test failed: Slurm's logs, the jobs' output, the runs' history and logs.
  static void keep_logs() {
    namespace fs = std::filesystem;
    const fs::path kept =
        fs::temp_directory_path() / ("birkhoff_slurm_failed_" + std::to_string(getpid()));
    std::error_code vanished;  // daemons may still remove files
    for (auto entry = fs::recursive_directory_iterator(folder_->path(), vanished);
         entry != fs::recursive_directory_iterator(); entry.increment(vanished)) {
      const fs::path extension = entry->path().extension(), path = entry->path();
      if (extension != ".log" && extension != ".out" && extension != ".jsonl") continue;
      const fs::path copy = kept / fs::relative(path, folder_->path());
      fs::create_directories(copy.parent_path());
      fs::copy_file(path, copy, fs::copy_options::overwrite_existing, vanished);
    }
    std::cout << "logs of the failed tests: " << kept.string() << '\n';
  }

  static inline std::string cluster_;
};

}  // namespace birkhoff
