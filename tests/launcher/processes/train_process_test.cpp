// Training as users start it: the real program, its supervisor, mpirun, signals and kills.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <sstream>
#include <thread>

#include "runtime/checkpoint/commit.h"
#include "runtime/checkpoint/run_folder.h"
#include "runtime/reporting/run_history.h"
#include "tests/launcher/processes/train_process_fixture.h"
#include "tests/launcher/slurm/stub_programs.h"
#include "tests/sanitized.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using std::chrono::seconds;
using testing::HasSubstr;

class TrainProcessTest : public TrainProcess {
 protected:
  // Sends the signal in the middle of the run; then the same command continues to the end.
  static void stop_and_resume(const std::string& name, int signal) {
    const Command command = train(name, {"--ranks", "2"});
    Child child(command);
    ASSERT_TRUE(wait_for_step(child, run(name), 30));
    child.signal(signal);
    const Finished stopped = child.finish(seconds(30));
    EXPECT_EQ(stopped.code, 75) << stopped.err;
    EXPECT_THAT(stopped.err, HasSubstr("saved at step"));
    EXPECT_TRUE(processes_of(run(name)).empty());
    const int step = last_step(run(name));
    EXPECT_LT(step, kSteps);
    char folder[32];
    std::snprintf(folder, sizeof folder, "step-%08d", step);
    EXPECT_EQ(checkpoint_names(run(name)).back(), folder) << "saved where it stopped";
    const Finished resumed = run_child(command);
    EXPECT_EQ(resumed.code, 0) << resumed.err;
    EXPECT_THAT(resumed.err, HasSubstr("resumes at step " + std::to_string(step)));
    expect_like_reference(name);
  }
};

TEST_F(TrainProcessTest, FromTextToSample) {
  const fs::path reference = run("reference");
  const MetricsLines metrics = lines_of_metrics(reference);
  std::vector<int> all_steps(kSteps);
  std::iota(all_steps.begin(), all_steps.end(), 1);
  EXPECT_EQ(metrics.steps, all_steps);
  EXPECT_EQ(metrics.evaluated, (std::vector<int>{100, 200, 300}));
  EXPECT_LT(metrics.losses.back(), 0.9 * metrics.losses.front()) << "it learns";
  for (const char* file : {"run.json", "config.txtpb", "metrics.jsonl", "loss.svg",
                           "log/rank-0.log", "log/rank-1.log"}) {
    EXPECT_TRUE(fs::is_regular_file(reference / file)) << file;
  }
  EXPECT_EQ(checkpoint_names(reference),
            (std::vector<std::string>{"step-00000250", "step-00000300"}));
  EXPECT_EQ(xml_defect(read_bytes(reference / "loss.svg")), "");
  EXPECT_THAT(read_bytes(reference / "loss.svg"), HasSubstr("<svg"));
  bool has_events = false;
  for (const auto& entry : fs::directory_iterator(reference))
    has_events |= entry.path().string().find("tfevents") != std::string::npos;
  EXPECT_TRUE(has_events);

  const Finished resolved = run_child(
      {.line = birkhoff_line({"config", "print", (reference / "config.txtpb").string()})});
  EXPECT_EQ(resolved.out, read_bytes(reference / "config.txtpb"))
      << "what was resolved resolves to itself";

  const Finished eval = run_child({.line = birkhoff_line({"eval", reference.string(), "--json"})});
  ASSERT_EQ(eval.code, 0) << eval.err;
  const auto figures = nlohmann::json::parse(eval.out);
  EXPECT_EQ(figures["step"], kSteps);
  EXPECT_EQ(figures["split"], "valid");
  std::ifstream lines(reference / "metrics.jsonl");
  nlohmann::json last;
  for (std::string line; std::getline(lines, line);) {
    if (const auto json = nlohmann::json::parse(line); json.contains("split")) last = json;
  }
  for (const char* key : {"loss", "bits_per_byte", "tokens", "bytes"}) {
    EXPECT_EQ(figures[key], last[key]) << key << ": one process and two ranks give the same bits";
  }

  const auto sample = [&](const std::string& seed) {
    return run_child({.line = birkhoff_line({"sample", reference.string(), "--prompt", "quick",
                                             "--tokens", "80", "--seed", seed})});
  };
  const Finished first = sample("1");
  EXPECT_EQ(first.code, 0) << first.err;
  EXPECT_EQ(first.out.rfind("quick", 0), 0u) << first.out;
  EXPECT_EQ(first.out.size(), 5 + 80 + 1u) << "prompt, 80 characters, a line end";
  EXPECT_EQ(first.out, sample("1").out);
  EXPECT_NE(first.out, sample("2").out);

  const Finished inspected = run_child({.line = birkhoff_line({"inspect", reference.string()})});
  EXPECT_EQ(inspected.code, 0) << inspected.err;
  EXPECT_THAT(inspected.out, HasSubstr("step         300"));
  EXPECT_THAT(inspected.out, HasSubstr("embedding.weight"));
  const Finished verified = run_child({.line = birkhoff_line({"verify", reference.string()})});
  EXPECT_EQ(verified.code, 0) << verified.err;
  EXPECT_THAT(verified.out, HasSubstr("step-00000250"));
  EXPECT_THAT(verified.out, HasSubstr("step-00000300"));
}

TEST_F(TrainProcessTest, AFinishedRunStaysAsItIs) {
  const Finished first = run_child(train("finished", {"--set", "train.steps=20"}));
  ASSERT_EQ(first.code, 0) << first.err;
  const fs::path before = fs::current_path();
  fs::current_path(run("finished"));
  const Tree tree = read_tree();
  fs::current_path(before);
  const Finished again = run_child(train("finished", {"--set", "train.steps=20"}));
  EXPECT_EQ(again.code, 0) << again.err;
  fs::current_path(run("finished"));
  Tree after = read_tree();
  fs::current_path(before);
  for (const auto& [file, bytes] : tree) {
    const bool may_grow = file.find("log/") == 0 || file == "lock" || file.starts_with("holder-");
    EXPECT_TRUE(may_grow || after[file] == bytes) << file;
  }
}

TEST_F(TrainProcessTest, SigtermSavesAndResumes) { stop_and_resume("sigterm", SIGTERM); }
TEST_F(TrainProcessTest, Sigusr1SavesAndResumes) { stop_and_resume("sigusr1", SIGUSR1); }
TEST_F(TrainProcessTest, SigintSavesAndResumes) { stop_and_resume("sigint", SIGINT); }

TEST_F(TrainProcessTest, CtrlCWithoutRanksSaves) {
  Child child(train("alone", {}));
  ASSERT_TRUE(wait_for_step(child, run("alone"), 30));
  child.signal(SIGINT);
  const Finished stopped = child.finish(seconds(30));
  EXPECT_EQ(stopped.code, 75) << stopped.err;
  EXPECT_FALSE(checkpoint_names(run("alone")).empty());
}

// Open MPI's session folder lies there; processes of a machine would share it.
TEST_F(TrainProcessTest, AProcessAloneNeedsNoSessionFolder) {
  Command command = train("no_session", {"--set", "train.steps=1"});
  command.environment = {{"TMPDIR", "/proc/none"}};
  const Finished trained = run_child(command);
  EXPECT_EQ(trained.code, 0) << trained.err;
}

TEST_F(TrainProcessTest, AnIgnoredSigchldDoesNotMatter) {
  Command command = train("sigchld", {"--ranks", "2", "--set", "train.steps=5"});
  command.line.insert(command.line.begin(), {"env", "--ignore-signal=CHLD"});
  const Finished finished = run_child(command);
  EXPECT_EQ(finished.code, 0) << finished.err;
}

TEST_F(TrainProcessTest, AStopOnNonFiniteNumbersKeepsTheCheckpointFromBefore) {
  const Finished trained = run_child(train("not_finite", {"--set", "train.steps=3"}));
  ASSERT_EQ(trained.code, 0) << trained.err;
  const Finished finished =
      run_child(train("not_finite", {"--ranks", "2", "--set", "checkpoint.every=1", "--set",
                                     "train.schedule.learning_rate=1e30", "--set",
                                     "train.clip_norm=0", "--set", "train.non_finite=stop"}));
  EXPECT_EQ(finished.code, 9) << finished.err;
  const std::string error = finished.err.substr(finished.err.rfind("birkhoff: "));
  EXPECT_THAT(error, HasSubstr("The checkpoint of step 3 predates the divergence"));
  EXPECT_EQ(checkpoint_names(run("not_finite")).back(), "step-00000003");
  EXPECT_THAT(read_bytes(run("not_finite") / "log/rank-0.log"), HasSubstr("not finite"))
      << "the error stands in the log too";
}

TEST_F(TrainProcessTest, Sigusr1ToOnesOwnMpirunSaves) {
  Child child(mpirun(2, "by_hand"));
  ASSERT_TRUE(wait_for_step(child, run("by_hand"), 30));
  child.signal(SIGUSR1);
  const Finished stopped = child.finish(seconds(30));
  EXPECT_EQ(stopped.code, 75) << stopped.err;
  EXPECT_LT(last_step(run("by_hand")), kSteps);
  const Finished resumed = run_child(mpirun(2, "by_hand"));
  EXPECT_EQ(resumed.code, 0) << resumed.err;
  expect_like_reference("by_hand");
}

TEST_F(TrainProcessTest, RanksInsideMpirunAreRefused) {
  const Finished finished = run_child(mpirun(2, "refused", {"--ranks", "2"}));
  EXPECT_EQ(finished.code, 2) << finished.err;
  EXPECT_THAT(finished.err, HasSubstr("leave --ranks out"));
  EXPECT_FALSE(fs::exists(run("refused")));
}

// --restarts: a lost rank costs the steps since the last save, not the run.
TEST_F(TrainProcessTest, LostRanksAreStartedAgain) {
  const std::string name = "restarted";
  Child child(train(name, {"--ranks", "2", "--restarts", "1"}));
  for (const int step : {70, 160}) {  // each after a new checkpoint
    ASSERT_TRUE(wait_for_step(child, run(name), step)) << child.finish(seconds(1)).err;
    const fs::path saved =
        run(name) / "checkpoints" / (step == 70 ? "step-00000050" : "step-00000150");
    while (child.is_running() && !fs::exists(saved)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    signal_rank(run(name), step == 70 ? 1 : 0, SIGKILL);
  }
  const Finished finished = child.finish();
  EXPECT_EQ(finished.code, 0) << finished.err;
  EXPECT_THAT(finished.err, HasSubstr("starting again from the checkpoint of step 50"));
  EXPECT_THAT(finished.err, HasSubstr("starting again from the checkpoint of step 150"));
  expect_like_reference(name);

  const std::vector<Job> jobs = read_history(RunPaths{run(name)}.history());
  ASSERT_EQ(jobs.size(), 3u);
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    SCOPED_TRACE(i);
    const Job& job = jobs[i];
    EXPECT_EQ(job.start.step, std::vector({0, 50, 150})[i]);
    EXPECT_EQ(job.start.ranks, 2);
    EXPECT_EQ(job.start.hosts.size(), 1u);
    ASSERT_TRUE(job.end);
    EXPECT_EQ(job.end->code, i < 2 ? 7 : 0);
    EXPECT_THAT(job.end->reason, HasSubstr(i < 2 ? "ended by signal 9" : "finished"));
    EXPECT_GE(job.end->time, job.start.time);
  }
  EXPECT_EQ(jobs[2].end->step, kSteps);
  const Finished inspected = run_child({.line = birkhoff_line({"inspect", run(name).string()})});
  EXPECT_THAT(inspected.out, HasSubstr("history      2 restarts, "));
  EXPECT_THAT(inspected.out, HasSubstr("exit 7, a rank was ended by signal 9"));
}

TEST_F(TrainProcessTest, RanksThatNeverStartAreStartedAgain) {
  StubPrograms stubs(folder_->path() / "stubs");
  stubs.write("mpirun", R"([ -e hung ] || { touch hung; sleep 300; }
PATH=${PATH#*:}; exec mpirun "$@")");
  const std::string limit = kSanitized ? "30" : "4";  // a start takes that long on a busy machine
  Command command =
      train("unstarted", {"--ranks", "2", "--restarts", "1", "--launch-seconds", limit});
  command.environment = {{"PATH", stubs.path()}};
  const Finished finished = run_child(command);
  EXPECT_EQ(finished.code, 0) << finished.err;
  EXPECT_THAT(finished.err, HasSubstr("birkhoff: mpirun did not start the ranks within " + limit +
                                      " s (--launch-seconds), and was ended\n"));
  EXPECT_THAT(finished.err, HasSubstr("exit code 7: starting again from the checkpoint of step 0"));
  EXPECT_EQ(stubs.calls("mpirun").size(), 2u);
  expect_like_reference("unstarted");
}

// The file system that ended the ranks may fail in the supervisor, too.
TEST_F(TrainProcessTest, AFailingFileSystemChangesNoEnd) {
  StubPrograms stubs(folder_->path() / "stubs");
  stubs.write("mpirun", R"(mkdir -p broken; touch broken/checkpoints
[ -e twice ] && exit 0; [ -e once ] && touch twice; touch once; exit 6)");
  stubs.forget_calls();
  Command command = train("broken", {"--ranks", "2", "--restarts", "2"});
  command.environment = {{"PATH", stubs.path()}};
  const auto start = std::chrono::steady_clock::now();
  const Finished finished = run_child(command);
  EXPECT_EQ(finished.code, 0) << finished.err;
  EXPECT_EQ(stubs.calls("mpirun").size(), 3u);
  EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::seconds(1 + 2))
      << "ranks that have not begun are started again after a while";
}

// The next job of a Slurm job that was asked to stop continues, also if ranks were lost meanwhile.
TEST_F(TrainProcessTest, RanksLostAfterARequest) {
  StubPrograms stubs(folder_->path() / "stubs");
  for (const char* launcher : {"mpirun", "srun"}) {
    stubs.write(launcher, "kill -TERM $PPID; sleep 0.5; exit 7");
  }
  stubs.write("scontrol", "echo node0");
  stubs.write("squeue", "exit 1");
  Command command = train("asked", {"--ranks", "2", "--restarts", "1"});
  command.environment = {{"PATH", stubs.path()}};
  Finished finished = run_child(command);
  EXPECT_EQ(finished.code, 7) << finished.err;
  command.environment.emplace_back("SLURM_JOB_ID", "17");
  command.environment.emplace_back("SLURM_JOB_NODELIST", "node0");
  finished = run_child(command);
  EXPECT_EQ(finished.code, 75) << finished.err;
  EXPECT_THAT(finished.err, HasSubstr("exit code 7 in a job that was asked to stop: the next job "
                                      "resumes from the checkpoint of step 0"));
}

TEST_F(TrainProcessTest, RestartsEndWithoutANewCheckpoint) {
  const std::string name = "stuck";
  Child child(train(name, {"--ranks", "2", "--restarts", "1", "--set", "checkpoint.every=0"}));
  for (int kill = 0; kill < 2; ++kill) {
    // The second job begins at step 1 again, and cuts the metrics of the first.
    ASSERT_TRUE(wait_for_step(child, run(name), 20)) << child.finish(seconds(1)).err;
    signal_rank(run(name), 1, SIGKILL);
    const auto is_at_the_start = [&] { return last_step(run(name)) < 20; };
    while (kill == 0 && !is_at_the_start() && child.is_running()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
  const Finished ended = child.finish();
  EXPECT_EQ(ended.code, 7) << ended.err;
  EXPECT_THAT(ended.err, HasSubstr("restart 1 of 1"));
  EXPECT_THAT(ended.err, HasSubstr("not started again: no new checkpoint since step 0"));
}

// kill -9 of one rank, of all ranks, of mpirun, or of all with mpirun and supervisor (like a
// machine that goes down), at random moments: the job ends within 5 s, nothing is left running, and
// the resumed run ends with the same bits. The run saves at every step, so that many kills hit a
// save, and every other job keeps its state in slices (ZeRO stage 3). BIRKHOFF_KILLS sets the
// number of kills.
TEST_F(TrainProcessTest, KillsAtRandomMomentsLoseNothing) {
  const char* set = std::getenv("BIRKHOFF_KILLS");
  const int num_kills = set != nullptr ? std::atoi(set) : 10;
  constexpr int kStepsBetween = 15;
  // more steps than it reaches between the kills
  const int num_steps = 3 * kStepsBetween * num_kills;
  // One head has centroids, which are state besides the parameters and the optimizer's.
  const std::vector<std::string> settings{
      "--ranks",
      "2",
      "--set",
      "train.steps=" + std::to_string(num_steps),
      "--set",
      "train.micro_batch=0",
      "--set",
      "model.attention.0={group{heads:1 mechanism{sinkhorn{block:8}}} group{heads:1 "
      "mechanism{routing{clusters:6 window:8 decay:0.9 reseed_after:3}}}}"};
  const Finished trained = run_child(train("kills_reference", settings), seconds(600));
  ASSERT_EQ(trained.code, 0) << trained.err;
  std::vector<std::string> with_saves = settings;
  with_saves.insert(with_saves.end(), {"--set", "checkpoint.every=1"});
  const Command command = train("killed", with_saves);
  std::vector<std::string> in_slices = with_saves;
  in_slices.insert(in_slices.end(), {"--set", "train.zero_stage=3"});
  const Command sliced = train("killed", in_slices);
  std::mt19937 random(20);
  int inside_a_save = 0, survived = 0;
  double slowest = 0;
  for (int kill = 0; kill < num_kills; ++kill) {
    SCOPED_TRACE("kill " + std::to_string(kill));
    const bool failed_before = HasFailure();
    Child child(kill % 2 == 0 ? command : sliced);
    // Kills are spread over the run: between two steps or, every fifth time, while it starts.
    const bool while_it_starts = kill % 5 == 4;
    if (while_it_starts) {
      std::this_thread::sleep_for(std::chrono::milliseconds(random() % 1500));
    } else {
      const int from = last_step(run("killed"));
      ASSERT_TRUE(wait_for_step(child, run("killed"), from + kStepsBetween))
          << child.finish(seconds(1)).err;
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 30000));
    }
    enum { kOneRank, kAllRanks, kMpirun, kEverything };
    const int kind = while_it_starts ? static_cast<int>(kEverything) : kill % 4;
    std::vector<pid_t> victims;
    if (kind == kOneRank) victims = {ranks_of(run("killed"))[random() % 2]};
    if (kind == kAllRanks) victims = ranks_of(run("killed"));
    if (kind == kMpirun) victims = {mpirun_of(run("killed"))};
    if (kind == kEverything) victims = processes_of(run("killed"));
    const auto start = std::chrono::steady_clock::now();
    kill_all(victims);
    const Finished killed = child.finish(seconds(20));
    EXPECT_TRUE(wait_until_none(run("killed"), seconds(20))) << "something is left running";
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    EXPECT_LT(taken.count(), 5);
    slowest = std::max(slowest, taken.count());
    if (kind != kEverything) {
      EXPECT_EQ(killed.code, 7) << killed.err;
      EXPECT_THAT(killed.err, HasSubstr("run the same command again"));
    }
    // The remains of an earlier kill are gone only if this start reached a step.
    if (!while_it_starts && fs::exists(run("killed") / "checkpoints")) {
      for (const std::string& name : checkpoint_names(run("killed")))
        inside_a_save += name.rfind(".tmp-", 0) == 0 ? 1 : 0;
    }
    survived += failed_before == HasFailure();
  }
  const Finished finished = run_child(command, seconds(600));
  EXPECT_EQ(finished.code, 0) << finished.err;
  expect_like_reference("killed", "kills_reference");
  EXPECT_GT(inside_a_save, 0);
  if (HasFailure()) survived = 0;
  std::cout << "kills: tried " << num_kills << ", survived " << survived << ", lost "
            << num_kills - survived << "; " << inside_a_save << " inside a save; slowest end "
            << slowest << " s after the kill\n";
}

// If the supervisor is killed, so are its ranks: none continues to train unseen.
TEST_F(TrainProcessTest, KilledSupervisorLeavesNothing) {
  Child child(train("orphans", {"--ranks", "2"}));
  ASSERT_TRUE(wait_for_step(child, run("orphans"), 30));
  child.signal(SIGKILL);
  child.finish(seconds(5));
  EXPECT_TRUE(wait_until_none(run("orphans"), seconds(10)));
}

TEST_F(TrainProcessTest, ResumesOnAnyNumberOfRanks) {
  const std::string name = "resized";
  const auto train_on = [&](int ranks, int stop_after) {
    Child child(train(name, {"--ranks", std::to_string(ranks), "--set", "train.precision=fp64"}));
    if (stop_after > 0) {
      EXPECT_TRUE(wait_for_step(child, run(name), stop_after));
      child.signal(SIGTERM);
    }
    const Finished finished = child.finish();
    EXPECT_EQ(finished.code, stop_after > 0 ? 75 : 0) << finished.err;
  };
  train_on(2, 40);
  train_on(1, 120);
  train_on(3, 0);
  const Finished reference = run_child(train("fp64", {"--set", "train.precision=fp64"}));
  ASSERT_EQ(reference.code, 0) << reference.err;
  const MetricsLines metrics = lines_of_metrics(run(name)),
                     expected = lines_of_metrics(run("fp64"));
  EXPECT_EQ(metrics.steps, expected.steps);
  EXPECT_EQ(metrics.evaluated, expected.evaluated);
  ASSERT_EQ(metrics.losses.size(), expected.losses.size());
  for (std::size_t i = 0; i < metrics.losses.size(); ++i) {
    ASSERT_NEAR(metrics.losses[i], expected.losses[i], 1e-10 * expected.losses[i])
        << "step " << i + 1;
  }
}

// With virtual shards the centroids of routing attention and the exponents of entmax have the same
// bits on any number of ranks, also with dropout, when clusters die and get new centroids, and when
// the run continues with more ranks.
TEST_F(TrainProcessTest, CentroidsAndExponentsDoNotDependOnTheNumberOfRanks) {
  const std::string routing = "model.attention.0.group.0.mechanism.routing.";
  const auto train_on = [&](const std::string& name, int ranks, int steps) {
    std::vector<std::string> arguments{"--ranks", std::to_string(ranks)};
    for (const std::string& setting :
         {"train.steps=" + std::to_string(steps), std::string("train.invariant.shards=4"),
          std::string("model.attention.0={group{heads:1 mechanism{routing{clusters:12 window:4 "
                      "decay:0.5 reseed_after:1 dropout:0.2}}} group{heads:1 mechanism{dense{"
                      "normalizer:entmax dropout:0.2}}}}")}) {
      arguments.insert(arguments.end(), {"--set", setting});
    }
    const Finished finished = run_child(train(name, arguments));
    EXPECT_EQ(finished.code, 0) << finished.err;
    return lines_of_metrics(run(name));
  };
  const MetricsLines one = train_on("routing_1", 1, 12);
  EXPECT_EQ(one.losses.size(), 12u);
  EXPECT_EQ(train_on("routing_2", 2, 12).losses, one.losses);
  EXPECT_EQ(train_on("routing_4", 4, 12).losses, one.losses);
  train_on("routing_resized", 3, 6);
  EXPECT_EQ(train_on("routing_resized", 2, 12).losses, one.losses);
  const auto tensors = final_tensors(run("routing_1"));
  EXPECT_TRUE(tensors.contains("blocks.0.attention.groups.0.centroids"));
  EXPECT_NE(tensors.at("blocks.0.attention.groups.1.exponent"), std::string(sizeof(float), '\0'))
      << "the exponent starts at 0 and learns";
  for (const char* other : {"routing_2", "routing_4", "routing_resized"}) {
    EXPECT_EQ(final_tensors(run(other)), tensors) << other;
  }

  const Finished eval =
      run_child({.line = birkhoff_line({"eval", run("routing_1").string(), "--json", "--set",
                                        routing + "measure_dense_mass=true"})});
  ASSERT_EQ(eval.code, 0) << eval.err;
  const double mass = nlohmann::json::parse(eval.out).at("blocks.0.attention.groups.0.dense_mass");
  EXPECT_GT(mass, 0.01);
  EXPECT_LT(mass, 0.99);

  // inspect prints the counts that the checkpoint has. A fresh model's are all 1.
  const Finished inspected =
      run_child({.line = birkhoff_line({"inspect", run("routing_1").string()})});
  ASSERT_EQ(inspected.code, 0) << inspected.err;
  const std::string& bytes = tensors.at("blocks.0.attention.groups.0.centroids");
  std::vector<float> values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  constexpr std::size_t kHeads = 1, kClusters = 12;
  const std::size_t row = values.size() / (kHeads * kClusters);
  std::set<float> counts;
  for (std::size_t head = 0; head < kHeads; ++head) {
    std::vector<std::string> texts;
    for (std::size_t cluster = 0; cluster < kClusters; ++cluster) {
      const float count = values[(head * kClusters + cluster + 1) * row - 2];
      counts.insert(count);
      texts.push_back(fmt::format("{:.4g}", count));
    }
    EXPECT_THAT(inspected.out,
                HasSubstr(fmt::format("  head {}: moving averages of the rows in a step {} (", head,
                                      fmt::join(texts, ", "))));
  }
  EXPECT_GT(counts.size(), 3u);
}

// An error that only the ranks can find is reported once, whatever their number.
TEST_F(TrainProcessTest, AnErrorInsideTheWorldHasItsCode) {
  const Finished finished =
      run_child(train("reference", {"--ranks", "2", "--set", "train.seed=9"}));
  EXPECT_EQ(finished.code, 3) << finished.err;
  EXPECT_THAT(finished.err, HasSubstr("train.seed: 1 -> 9"));
  EXPECT_EQ(finished.err.find("train.seed"), finished.err.rfind("train.seed"))
      << "once: " << finished.err;
}

}  // namespace
}  // namespace birkhoff
