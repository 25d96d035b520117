// Faults one after another in a run of four nodes: the time until the next step, and the share of
// the time that counts. BIRKHOFF_SLURM_FAULTS sets the number of faults.
#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <map>
#include <random>

#include "launcher/plan/effective_time.h"
#include "slurm_fixture.h"

namespace birkhoff {
namespace {

constexpr int kSaveEvery = 50;  // steps

enum class Fault { kRank, kNode, kBatchHost, kPreemption };

const char* name_of(Fault fault) {
  switch (fault) {
    case Fault::kRank:
      return "lost rank";
    case Fault::kNode:
      return "lost node";
    case Fault::kBatchHost:
      return "lost batch host";
    case Fault::kPreemption:
      return "preemption";
  }
  return "";
}

// The least of the values that this share of them does not exceed; 0 without values.
double quantile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  const double last = static_cast<double>(values.size()) - 1;
  return values.empty() ? 0 : values[static_cast<std::size_t>(std::ceil(share * last))];
}

// The time from a fault to the next step.
struct Relaunch {
  Fault fault;
  double until_noted, until_training, until_step;  // s, each from the one before
  double seconds() const { return until_noted + until_training + until_step; }
};

void print(const std::vector<Relaunch>& all, Fault fault) {
  const std::vector<std::pair<const char*, std::function<double(const Relaunch&)>>> phases = {
      {"until its job's end is noted", [](const Relaunch& r) { return r.until_noted; }},
      {"until ranks train again", [](const Relaunch& r) { return r.until_training; }},
      {"until the first step", [](const Relaunch& r) { return r.until_step; }},
      {"together", [](const Relaunch& r) { return r.seconds(); }}};
  for (const auto& [phase, seconds] : phases) {
    std::vector<double> values;
    for (const Relaunch& one : all) {
      if (one.fault == fault) values.push_back(seconds(one));
    }
    if (values.empty()) return;
    std::cout << name_of(fault) << ", " << phase << ": tried " << values.size() << ", median "
              << quantile(values, 0.5) << " s, p95 " << quantile(values, 0.95) << " s, most "
              << quantile(values, 1) << " s\n";
  }
}

class SlurmFaults : public Slurm {
 protected:
  static int num_faults(int by_default) {
    const char* set = std::getenv("BIRKHOFF_SLURM_FAULTS");
    return set != nullptr ? std::atoi(set) : by_default;
  }

  // A run that ends only when it is canceled, on three nodes and a spare one.
  void start(const std::string& name) {
    const std::string steps = "train.steps=1000000", every = std::to_string(kSaveEvery);
    submit(name, kReadMs,
           {"--nodes", "4", "--spare-nodes", "1", "--restarts", "5", "--set", steps, "--set",
            "train.schedule.shape=constant", "--set", "evaluate.every=0", "--set",
            "checkpoint.every=" + every});
    dead_ = 0;
  }
  static std::string job(const std::string& name) { return submitted_jobs(run(name)).back().id; }

  // The first status of the run's K-th job (from 1), which it writes after its first step.
  static std::optional<JobStatus> wait_for_job(const std::string& name, std::size_t k) {
    const auto deadline = Clock::now() + seconds(180);
    for (; Clock::now() < deadline; std::this_thread::sleep_for(std::chrono::milliseconds(20))) {
      const std::vector<Job> jobs = history(name);
      const auto status = read_status(RunPaths{run(name)}.status());
      if (jobs.size() == k && status && status->time > jobs.back().start.time &&
          status->step > jobs.back().start.step) {
        return status;
      }
    }
    return std::nullopt;
  }
  // Waits until the last job has saved something new, so that its loss is no reason to give up.
  static bool wait_for_save(const std::string& name) {
    const std::int64_t resumed = history(name).back().start.step;
    const auto deadline = Clock::now() + seconds(60);
    while (read_status(RunPaths{run(name)}.status())->saved_step <= resumed) {
      if (Clock::now() > deadline) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    return true;
  }

  void make(Fault fault, const std::string& name, int rank) {
    switch (fault) {
      case Fault::kRank: {
        const pid_t process = process_of_task(run(name), rank);
        ASSERT_GT(process, 0) << output(name);
        kill(process, SIGKILL);
        return;
      }
      case Fault::kNode:
      case Fault::kBatchHost: {
        // The first node of a job has its batch script; a spare node has no rank.
        dead_ = fault == Fault::kNode ? 1 + rank % 2 : 0;
        const Finished killed =
            run_child({.line = {SLURM_CLUSTER, "kill", cluster_, std::to_string(dead_)}});
        ASSERT_EQ(killed.code, 0) << killed.err;
        return;
      }
      case Fault::kPreemption: {
        const Finished urgent =
            run_child({.line = {"sbatch", "--parsable", "--partition=urgent", "--nodes=4",
                                "--exclusive", "--output=/dev/null", "--wrap=true"}});
        ASSERT_EQ(urgent.code, 0) << urgent.err;
      }
    }
  }
  void revive() {
    const Finished revived = run_child(
        {.line = {SLURM_CLUSTER, "revive", cluster_, std::to_string(dead_)}}, seconds(180));
    EXPECT_EQ(revived.code, 0) << revived.err;
  }

  // Makes a fault in the run's last job, and waits until the next one has done a step.
  void relaunch(Fault fault, const std::string& name, int rank, std::vector<Relaunch>& all) {
    const std::size_t jobs_before = history(name).size();
    const double made = unix_seconds();
    make(fault, name, rank);
    if (HasFatalFailure()) return;
    if (fault == Fault::kBatchHost) {  // its job goes back once Slurm misses the node
      for (int wait = 0; field(job(name), "JobState") == "RUNNING" && wait < 600; ++wait) {
        std::this_thread::sleep_for(std::chrono::milliseconds(200));
      }
      EXPECT_NE(field(job(name), "JobState"), "RUNNING") << output(name);
      std::cout << "lost batch host: back in the queue after " << unix_seconds() - made << " s\n";
      revive();
    }
    const auto status = wait_for_job(name, jobs_before + 1);
    ASSERT_TRUE(status) << name_of(fault) << '\n' << output(name);
    const std::vector<Job> jobs = history(name);
    // If the supervisor is gone, the next job notes the end, with the time of the last status.
    const double training = jobs[jobs_before].start.time,
                 noted = std::clamp(jobs[jobs_before - 1].end->time, made, training);
    all.push_back({fault, noted - made, training - noted, status->time - training});
  }

  int dead_ = 0;  // the node that was killed last
};

TEST_F(SlurmFaults, RanksTrainAgainSoonAfterAFault) {
  const int trials = num_faults(4);
  std::mt19937 random(1);
  std::vector<Relaunch> all;
  start("relaunch");
  ASSERT_TRUE(wait_for_job("relaunch", 1)) << output("relaunch");
  for (int trial = 0; trial < trials; ++trial) {
    ASSERT_TRUE(wait_for_save("relaunch")) << output("relaunch");
    std::this_thread::sleep_for(std::chrono::milliseconds(random() % 2000));
    const bool of_node = trial % 4 == 3;
    const int rank = static_cast<int>(random() % 3);
    relaunch(of_node ? Fault::kNode : Fault::kRank, "relaunch", rank, all);
    if (HasFatalFailure()) return;
    if (!of_node || trial + 1 == trials) continue;
    // The spare node is used up: another job has one again.
    const std::size_t jobs = history("relaunch").size();
    EXPECT_EQ(run_child({.line = birkhoff_line({"cancel", run("relaunch").string()})}).code, 0);
    revive();
    start("relaunch");
    ASSERT_TRUE(wait_for_job("relaunch", jobs + 1)) << output("relaunch");
  }
  EXPECT_EQ(field(job("relaunch"), "Restarts"), "0") << "it went back to the queue";
  if (dead_ > 0) revive();
  ASSERT_TRUE(wait_for_save("relaunch"));
  const std::size_t in_one_allocation = all.size();
  relaunch(Fault::kBatchHost, "relaunch", 0, all);
  EXPECT_EQ(field(job("relaunch"), "Restarts"), "1") << output("relaunch");
  for (const Fault fault : {Fault::kRank, Fault::kNode, Fault::kBatchHost}) print(all, fault);
  std::vector<double> taken;
  for (std::size_t i = 0; i < in_one_allocation; ++i) taken.push_back(all[i].seconds());
  std::cout << "relaunches in one allocation: tried " << trials << ", lost "
            << trials - static_cast<int>(taken.size()) << ", p95 " << quantile(taken, 0.95)
            << " s\n";
  EXPECT_LE(quantile(taken, 0.95), 15);
}

// Lost ranks and nodes, and preemptions, at random after 30 s of training on average. The model of
// `plan` has only faults that throw a run back; a preempted run has saved.
TEST_F(SlurmFaults, TheShareOfTimeThatCountsIsThatOfTheModel) {
  const int faults = num_faults(5);
  std::mt19937 random(2);
  std::exponential_distribution<double> seconds_between(1.0 / 30);
  std::vector<Relaunch> all;
  start("faults");
  ASSERT_TRUE(wait_for_job("faults", 1)) << output("faults");

  // Parts of the model: a step, and what a save and all else takes between steps.
  ASSERT_TRUE(wait_for_save("faults"));
  const JobStatus first = *read_status(RunPaths{run("faults")}.status());
  std::this_thread::sleep_for(seconds(30));
  const JobStatus second = *read_status(RunPaths{run("faults")}.status());
  const double steps = static_cast<double>(second.step - first.step),
               in_steps = second.step_seconds - first.step_seconds,
               of_save = (second.time - first.time - in_steps) * kSaveEvery / steps,
               interval = kSaveEvery * in_steps / steps;

  bool has_spare = true;
  for (int i = 0; i < faults; ++i) {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds_between(random)));
    Fault fault = std::vector{Fault::kRank, Fault::kNode, Fault::kRank, Fault::kPreemption,
                              Fault::kRank}[static_cast<std::size_t>(i % 5)];
    if (fault == Fault::kNode && !has_spare) fault = Fault::kPreemption;
    relaunch(fault, "faults", static_cast<int>(random() % 3), all);
    if (HasFatalFailure()) return;
    if (fault == Fault::kNode) revive();
    if (fault != Fault::kRank) has_spare = fault == Fault::kPreemption;
  }

  const auto status = read_status(RunPaths{run("faults")}.status());
  const RunTotals totals = totals_of(history("faults"), status, status->time);
  std::map<bool, double> relaunching, count;  // by whether the run was thrown back
  for (const Relaunch& one : all) {
    relaunching[one.fault != Fault::kPreemption] += one.seconds();
    ++count[one.fault != Fault::kPreemption];
  }
  const double rest = totals.seconds - relaunching[false],
               per_restart = relaunching[true] / count[true],
               between = rest / count[true] - per_restart;
  // The model's faults also hit restarts, which then take longer than its restart_seconds: here
  // they hit only steps and saves.
  const FaultModel model{.faults_per_day = 86400 / between,
                         .save_seconds = of_save,
                         .restart_seconds = between * std::log1p(per_restart / between)};
  const double expected = effective_time(model, interval).steps * rest / totals.seconds,
               measured = totals.effective_seconds / totals.seconds;
  for (const Fault fault : {Fault::kRank, Fault::kNode, Fault::kPreemption}) print(all, fault);
  std::cout << "effective time: tried " << faults << " faults in " << totals.seconds
            << " s, one per " << totals.seconds / faults << " s; share " << measured
            << ", by the model " << expected << ", ratio " << measured / expected << '\n';
  // A few faults are too few for the model's averages.
  const double tolerance = faults >= 50 ? 0.05 : 0.25;
  EXPECT_NEAR(measured / expected, 1, tolerance);
}

}  // namespace
}  // namespace birkhoff
