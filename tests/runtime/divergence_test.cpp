// Runs that diverge: their newest checkpoint predates the divergence, and the cure that the message
// names works.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <cmath>
#include <iostream>
#include <optional>
#include <random>

#include "cluster/base/error.h"
#include "runtime/checkpoint/commit.h"
#include "runtime/checkpoint/run_folder.h"
#include "runtime/reporting/reporter.h"
#include "runtime/run_checkpoints.h"
#include "tests/cluster/base/thread_group.h"
#include "tests/runtime/checkpoint/checkpoint_fixture.h"
#include "tests/runtime/toy_training.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using test::toy_batch;
using test::toy_config;
using test::ToyTraining;
using testing::HasSubstr;

// How a process of a run ended.
struct Ended {
  ExitCode code = ExitCode::kOk;
  std::string error;
  at::Tensor parameters;  // of rank 0
  TrainState state;
  std::optional<std::int64_t> newest;  // RunCheckpoints::newest()
};

// One process of a run, with the calls of runtime/train_run: resumes from the newest checkpoint of
// the folder, trains, saves. `prepare` may spoil the training of each rank.
Ended train(const fs::path& folder, const configs::Config& config, int ranks,
            const std::function<void(ToyTraining&)>& prepare = {}) {
  const StopSignals signals;
  RunFolder run(folder, /*seed=*/1, /*fresh=*/false);
  const auto resume = run.find_resume_point();
  std::vector<Ended> of_ranks(static_cast<std::size_t>(ranks));
  run_ranks(ranks, [&](ProcessGroup& world) {
    Ended& ended = of_ranks[static_cast<std::size_t>(world.rank())];
    ToyTraining training(config, world, at::kFloat);
    if (config.train().precision() == configs::Train::fp16) {
      training.state.loss_scale.value = LossScale::kInitial;
    }
    std::vector<TensorPart> parts =
        training_parts(training.model, training.buckets, *training.optimizer, world.size());
    if (resume) {
      load_checkpoint(*resume, parts);
      read_state(resume->manifest, resume->manifest.config(), training.state);
    }
    CheckpointHeader header;
    header.set_run(run.id());
    *header.mutable_config() = config;
    CheckpointWriter writer(run.paths().checkpoints(),
                            {config.checkpoint().keep(), config.checkpoint().keep_best()}, {},
                            world);
    const Reporter reporter;
    RunCheckpoints checkpoints(&writer, world, header, parts,
                               resume ? std::optional(training.state.step) : std::nullopt,
                               world.rank() == 0 ? &run : nullptr, reporter);
    checkpoints.check_space();
    training.checkpoints = &checkpoints;
    Evaluator evaluator(training.model, world, {"valid", 4, 4},
                        [](std::int64_t begin, std::int64_t end) { return toy_batch(begin, end); });
    if (config.has_evaluate()) training.evaluator = &evaluator;
    if (prepare) prepare(training);
    try {
      ended.code = training.run(signals) == Outcome::kRequeue ? ExitCode::kRequeue : ExitCode::kOk;
    } catch (const Error& error) {
      ended.code = error.code();
      ended.error = error.what();
    }
    ended.parameters = training.parameters().clone();
    ended.state = training.state;
    ended.newest = checkpoints.newest();
  });
  for (const Ended& ended : of_ranks) {
    EXPECT_EQ(ended.code, of_ranks[0].code);
    EXPECT_EQ(ended.error, of_ranks[0].error) << "one line for all ranks";
    EXPECT_EQ(ended.newest, of_ranks[0].newest);
  }
  return of_ranks[0];
}

// The same bits on any number of ranks, and a learning rate that does not depend on the run's
// length.
configs::Config config_of(std::int64_t steps) {
  configs::Config config = toy_config(steps);
  config.mutable_train()->mutable_invariant()->set_shards(6);
  config.mutable_train()->mutable_schedule()->set_shape(configs::Schedule::constant);
  config.mutable_checkpoint()->set_every(5);
  return config;
}

// From the next step on nothing is finite.
configs::Config diverging(configs::Config config, std::int64_t steps) {
  config.mutable_train()->set_steps(steps);
  config.mutable_train()->mutable_schedule()->set_learning_rate(1e30f);
  config.mutable_train()->set_clip_norm(0);
  return config;
}

std::vector<std::int64_t> steps_saved(const fs::path& folder) {
  std::vector<std::int64_t> steps;
  for (const auto& [step, path] : list_checkpoints(RunPaths{folder}.checkpoints())) {
    const CheckpointFolder checkpoint = open_checkpoint(path);
    verify_checkpoint(checkpoint);
    EXPECT_EQ(checkpoint.manifest.skipped(), 0);
    steps.push_back(step);
  }
  return steps;
}

using Steps = std::vector<std::int64_t>;

class Divergence : public testing::Test {
 protected:
  Divergence() { testing::internal::CaptureStderr(); }
  ~Divergence() override { testing::internal::GetCapturedStderr(); }

  const TestFolder folder_;
  const fs::path run_ = folder_.path() / "run";
};

TEST_F(Divergence, KeepsTheCheckpointsFromBeforeAndTheCureWorks) {
  EXPECT_EQ(train(run_, config_of(40), 1).code, ExitCode::kOk);
  EXPECT_EQ(steps_saved(run_), (Steps{35, 40}));
  for (int attempt = 0; attempt < 2; ++attempt) {
    const Ended diverged = train(run_, diverging(config_of(0), 100), 1);
    EXPECT_EQ(diverged.code, ExitCode::kNumerical);
    EXPECT_THAT(diverged.error, HasSubstr("step 61: not finite"));
    EXPECT_THAT(diverged.error,
                HasSubstr("The checkpoint of step 40 predates the divergence: lower "
                          "train.schedule.learning_rate and start again"));
    EXPECT_EQ(steps_saved(run_), (Steps{35, 40}));
  }
  const Ended cured = train(run_, config_of(100), 1);
  EXPECT_EQ(cured.code, ExitCode::kOk);
  const TestFolder elsewhere;
  EXPECT_TRUE(
      at::equal(cured.parameters, train(elsewhere.path() / "run", config_of(100), 1).parameters));
}

// Nothing was saved before the divergence: the run starts again from its first step.
TEST_F(Divergence, FromTheStartLeavesNoCheckpoint) {
  const Ended diverged = train(run_, diverging(config_of(0), 15), 2);
  EXPECT_EQ(diverged.code, ExitCode::kNumerical);
  EXPECT_THAT(diverged.error, HasSubstr("step 15: training ends, but its last 14 steps were "
                                        "skipped as not finite: not saved"));
  EXPECT_THAT(diverged.error, HasSubstr("No checkpoint predates the divergence"));
  EXPECT_EQ(steps_saved(run_), Steps{});
  EXPECT_EQ(train(run_, config_of(15), 2).code, ExitCode::kOk);
}

// The step that ruins the parameters is itself applied, and finite: only the next one shows it.
TEST_F(Divergence, ASaveRightAfterTheFatalStepIsDropped) {
  configs::Config config = config_of(7);
  config.mutable_checkpoint()->set_every(1);
  config.mutable_checkpoint()->set_keep(1);
  EXPECT_EQ(train(run_, config, 1).code, ExitCode::kOk);
  const Ended diverged = train(run_, diverging(config, 100), 1);
  EXPECT_EQ(diverged.code, ExitCode::kNumerical);
  EXPECT_EQ(diverged.newest, 7);
  EXPECT_EQ(steps_saved(run_), Steps{7});
  // The same if it is the last step, or the step at which a signal stops the run.
  const Ended ended = train(run_, diverging(config, 8), 1);
  EXPECT_EQ(ended.code, ExitCode::kNumerical);
  EXPECT_THAT(
      ended.error,
      HasSubstr("step 8: training ends, but its parameters give values that are not finite"));
  EXPECT_EQ(steps_saved(run_), Steps{7});
  const Ended stopped = train(run_, diverging(config, 100), 1, [](ToyTraining& training) {
    training.before_batch = [&](std::int64_t step) {
      if (step == 8) training.request_stop(SIGTERM);
    };
  });
  EXPECT_EQ(stopped.code, ExitCode::kRequeue);
  EXPECT_EQ(stopped.state.step, 8);
  EXPECT_EQ(steps_saved(run_), Steps{7});
}

TEST_F(Divergence, AStopDuringAStreakSavesNothing) {
  EXPECT_EQ(train(run_, config_of(10), 2).code, ExitCode::kOk);
  testing::internal::GetCapturedStderr();
  testing::internal::CaptureStderr();
  const Ended stopped = train(run_, diverging(config_of(0), 100), 2, [](ToyTraining& training) {
    training.before_batch = [&](std::int64_t step) {
      if (step == 17) training.request_stop(SIGTERM);
    };
  });
  EXPECT_EQ(stopped.code, ExitCode::kRequeue);
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              HasSubstr("stop at step 17: not saved, because its last 6 steps were skipped as not "
                        "finite. The checkpoint of step 10 predates the divergence"));
  testing::internal::CaptureStderr();
  EXPECT_EQ(steps_saved(run_), (Steps{5, 10}));
  EXPECT_EQ(train(run_, config_of(20), 2).code, ExitCode::kOk);
}

// A few bad batches: training continues, and a save that was due among them is made later.
TEST_F(Divergence, ASaveThatIsDueDuringAStreakWaitsForItsEnd) {
  const Ended ended = train(run_, config_of(12), 2, [](ToyTraining& training) {
    for (const std::int64_t step : {4, 5, 6}) training.model.spoil(step, 12 * step - 1);
  });
  EXPECT_EQ(ended.code, ExitCode::kOk);
  EXPECT_EQ(steps_saved(run_), (Steps{10, 12}));
  configs::Config all = config_of(12);
  all.mutable_checkpoint()->set_keep(10);
  const TestFolder elsewhere;
  train(elsewhere.path() / "run", all, 2, [](ToyTraining& training) {
    for (const std::int64_t step : {4, 5, 6}) training.model.spoil(step, 12 * step - 1);
  });
  EXPECT_EQ(steps_saved(elsewhere.path() / "run"), (Steps{7, 10, 12}));
}

// A save begins and the step after it is skipped: the save is committed once a step is applied.
TEST_F(Divergence, ASaveIsCommittedAfterTheNextAppliedStep) {
  std::vector<std::optional<std::int64_t>> seen;
  train(run_, config_of(12), 1, [&](ToyTraining& training) {
    for (const std::int64_t step : {6, 7}) training.model.spoil(step, 12 * step - 1);
    training.before_batch = [&](std::int64_t) { seen.push_back(training.checkpoints->newest()); };
  });
  ASSERT_GE(seen.size(), 12u);
  for (std::size_t step = 1; step <= 8; ++step) EXPECT_EQ(seen[step - 1], std::nullopt) << step;
  EXPECT_EQ(steps_saved(run_), (Steps{10, 12}));
}

// With an infinite optimizer moment all later steps are finite, but the run is lost.
TEST_F(Divergence, AStateThatIsNotFiniteEndsTheRunAtItsNextSave) {
  for (const bool zero : {false, true}) {
    const TestFolder folder;
    configs::Config config = config_of(12);
    config.mutable_train()->set_zero_stage(zero);
    const Ended ended = train(folder.path() / "run", config, 3, [](ToyTraining& training) {
      training.before_batch = [&training](std::int64_t step) {
        if (step != 8) return;
        for (TensorPart& part : training.optimizer->state()) {
          if (part.name == "adamw.v/unused" && part.data.numel() > 0) part.data.fill_(INFINITY);
        }
      };
    });
    EXPECT_EQ(ended.code, ExitCode::kNumerical);
    EXPECT_THAT(ended.error, HasSubstr("step 10: adamw.v/unused holds values that are not finite"));
    EXPECT_THAT(ended.error, HasSubstr("The checkpoint of step 5 predates the divergence"));
    EXPECT_EQ(steps_saved(folder.path() / "run"), Steps{5});
  }
}

TEST_F(Divergence, ABatchThatCannotBeReadCostsNoStep) {
  const Ended whole = train(run_.parent_path() / "whole", config_of(12), 3);
  std::atomic<bool> is_damaged = true;
  const Ended ended = train(run_, config_of(12), 3, [&](ToyTraining& training) {
    training.before_batch = [&](std::int64_t step) {
      if (step == 8 && is_damaged.exchange(false)) fail(ExitCode::kData, "page 3 is damaged");
    };
  });
  EXPECT_EQ(ended.code, ExitCode::kData);
  EXPECT_THAT(ended.error, testing::StartsWith("page 3 is damaged (rank "));
  EXPECT_EQ(steps_saved(run_), (Steps{5, 7}));
  EXPECT_TRUE(train(run_, config_of(12), 2).parameters.equal(whole.parameters));
}

TEST_F(Divergence, AnEvaluationThatIsNotFiniteAtTheEndIsAnError) {
  configs::Config config = config_of(12);
  config.mutable_evaluate()->set_every(4);
  EXPECT_EQ(train(run_, config, 1).code, ExitCode::kOk);
  const Ended ended = train(run_, diverging(config, 13), 1);
  EXPECT_EQ(ended.code, ExitCode::kNumerical);
  EXPECT_THAT(ended.error, HasSubstr("step 13: training ends, but the loss of its evaluation is "));
  EXPECT_EQ(steps_saved(run_), (Steps{10, 12}));
}

// Folders of earlier versions, which saved any state.
TEST_F(Divergence, CheckpointsThatEarlierVersionsSavedOfADivergedRunArePassedOver) {
  EXPECT_EQ(train(run_, config_of(10), 1).code, ExitCode::kOk);
  const std::string id = RunFolder(run_, 1, false).id();
  const auto save = [&](std::int64_t step, int skipped, bool finite) {
    run_ranks(1, [&](ProcessGroup& world) {
      ToyTraining training(config_of(10), world, at::kFloat);
      auto parts = training_parts(training.model, training.buckets, *training.optimizer, 1);
      const at::NoGradGuard no_grad;
      if (!finite) parts[2].data.view(-1)[3].fill_(std::nan(""));
      CheckpointWriter writer(RunPaths{run_}.checkpoints(), 10, {}, world);
      CheckpointHeader header;
      header.set_run(id);
      header.set_step(step);
      header.set_skipped(skipped);
      writer.save(header, parts);
      writer.finish();
    });
  };
  save(15, 4, true);
  save(20, 0, false);
  save(25, 14, true);
  EXPECT_EQ(
      find_newest_checkpoint(RunPaths{run_}.checkpoints(), /*set_aside=*/false)->manifest.step(),
      25)
      << "a reader that changes nothing sees the newest";
  testing::internal::GetCapturedStderr();
  testing::internal::CaptureStderr();
  const Ended resumed = train(run_, config_of(12), 1);
  EXPECT_EQ(resumed.code, ExitCode::kOk);
  const std::string told = testing::internal::GetCapturedStderr();
  testing::internal::CaptureStderr();
  EXPECT_THAT(told, HasSubstr("saved while the run diverged: step 25 (14 skipped steps before it), "
                              "step 20 (hidden.weight is not finite), step 15 (4 skipped steps "
                              "before it); set aside as diverged-step-*, resuming from step 10"));
  EXPECT_EQ(told.find("diverged", told.find("resuming from")), std::string::npos) << "one line";
  EXPECT_EQ(steps_saved(run_), (Steps{10, 12}));
  EXPECT_TRUE(fs::exists(RunPaths{run_}.checkpoints() / "diverged-step-00000025"));
}

TEST_F(Divergence, WhereNoCheckpointIsFromBeforeNothingStartsByItself) {
  EXPECT_EQ(train(run_, config_of(3), 1).code, ExitCode::kOk);
  const fs::path step = RunPaths{run_}.checkpoints() / "step-00000003";
  fs::rename(step, step.parent_path() / "diverged-step-00000003");
  try {
    train(run_, config_of(5), 1);
    ADD_FAILURE() << "started afresh";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kCheckpoint);
    EXPECT_THAT(error.what(), HasSubstr("diverged-step-*"));
    EXPECT_THAT(error.what(), HasSubstr("--fresh"));
  }
}

TEST_F(Divergence, TheBestCheckpointIsKeptHoweverOld) {
  configs::Config config = config_of(30);
  config.mutable_checkpoint()->set_every(2);
  config.mutable_checkpoint()->set_keep_best(true);
  config.mutable_evaluate()->set_every(4);
  EXPECT_EQ(train(run_, config, 2).code, ExitCode::kOk);
  // Learns to the end: the last checkpoint is the best, and no other is kept for that.
  EXPECT_EQ(steps_saved(run_), (Steps{28, 30}));
  // From here on each step makes the model worse.
  configs::Config worse = config;
  worse.mutable_train()->mutable_schedule()->set_learning_rate(3);
  worse.mutable_train()->mutable_schedule()->set_warmup_steps(0);
  for (const std::int64_t steps : {37, 44, 50}) {  // remembered through restarts
    worse.mutable_train()->set_steps(steps);
    EXPECT_EQ(train(run_, worse, 1).code, ExitCode::kOk);
    const Steps saved = steps_saved(run_);
    ASSERT_EQ(saved.size(), 3u);
    EXPECT_EQ(saved[0], 30);
    EXPECT_EQ(saved[2], steps);
    // A checkpoint at a step without an evaluation has no loss.
    for (const auto& [step, path] : list_checkpoints(RunPaths{run_}.checkpoints())) {
      EXPECT_EQ(open_checkpoint(path).manifest.has_held_out_loss(),
                step % 4 == 0 || step == 30 || step == steps)
          << step;
    }
  }
  worse.mutable_checkpoint()->set_keep_best(false);
  worse.mutable_train()->set_steps(52);
  EXPECT_EQ(train(run_, worse, 1).code, ExitCode::kOk);
  EXPECT_EQ(steps_saved(run_), (Steps{50, 52}));
}

TEST_F(Divergence, WithoutSpaceForASaveARunDoesNotStart) {
  std::atomic<std::int64_t> free = 1000;
  set_free_bytes_hook([&free](const std::string&) { return free.load(); });
  struct Reset {
    ~Reset() { set_free_bytes_hook({}); }
  } reset;
  const auto expect_too_little = [&](const std::string& free_text) {
    try {
      const Ended ended = train(run_, config_of(12), 2);
      EXPECT_EQ(ended.code, ExitCode::kStorage);
      EXPECT_THAT(ended.error, HasSubstr(free_text));
    } catch (const Error& error) {  // at the start of a run
      EXPECT_EQ(error.code(), ExitCode::kStorage);
      EXPECT_THAT(error.what(), HasSubstr(free_text));
      EXPECT_THAT(error.what(), HasSubstr((run_ / "checkpoints").string()));
    }
  };
  expect_too_little(" bytes, and 1000 bytes are free on that file system");
  EXPECT_EQ(steps_saved(run_), Steps{});
  // One fits, three do not: two are kept while one is being written.
  free = 6000;
  testing::internal::GetCapturedStderr();
  testing::internal::CaptureStderr();
  EXPECT_EQ(train(run_, config_of(12), 2).code, ExitCode::kOk);
  EXPECT_THAT(
      testing::internal::GetCapturedStderr(),
      HasSubstr("the next save fits, but the checkpoints to keep do not: 3 checkpoints of "));
  testing::internal::CaptureStderr();
  // The disk fills while the run trains: the next save ends the run, and its checkpoints stay.
  const Ended full = train(run_, config_of(30), 2, [&](ToyTraining& training) {
    training.before_batch = [&free](std::int64_t step) {
      if (step == 14) free = 100;
    };
  });
  EXPECT_EQ(full.code, ExitCode::kStorage);
  EXPECT_EQ(steps_saved(run_), (Steps{10, 12}));
}

// ---- Random histories

class History {
 public:
  explicit History(unsigned seed) : random_(seed) {}

  // Trains, diverges and is cured, in a new folder. Returns what it did, for messages.
  std::string run() {
    const TestFolder folder;
    const fs::path run = folder.path() / "run";
    configs::Config good = config_of(0);
    good.mutable_checkpoint()->set_every(pick(0, 7));
    good.mutable_checkpoint()->set_keep(static_cast<int>(pick(1, 3)));
    good.mutable_checkpoint()->set_keep_best(pick(0, 1) == 1);
    good.mutable_train()->set_max_skipped(static_cast<int>(pick(2, 25)));
    good.mutable_train()->set_zero_stage(pick(0, 1) == 1);
    if (pick(0, 3) > 0) good.mutable_evaluate()->set_every(pick(0, 6));
    std::int64_t step = 0;
    told_ = fmt::format("every {}, keep {}, keep_best {}, max_skipped {}, zero {}, evaluate {}",
                        good.checkpoint().every(), good.checkpoint().keep(),
                        good.checkpoint().keep_best(), good.train().max_skipped(),
                        good.train().zero_stage(), good.has_evaluate());
    for (std::int64_t part = pick(1, 3); part > 0; --part) {
      if (const std::int64_t steps = pick(0, 15); steps > 0) {
        good.mutable_train()->set_steps(step += steps);
        expect(ExitCode::kOk, train(run, good, ranks()), fmt::format("to {}", step));
      }
      diverge(run, good, step);
    }
    good.mutable_train()->set_steps(step + pick(1, 15));
    const Ended cured = train(run, good, ranks());
    expect(ExitCode::kOk, cured, fmt::format("cured, to {}", good.train().steps()));
    const Ended undisturbed = train(folder.path() / "undisturbed", good, 1);
    EXPECT_TRUE(at::equal(cured.parameters, undisturbed.parameters)) << told_;
    EXPECT_EQ(cured.state.tokens, undisturbed.state.tokens) << told_;
    return told_;
  }

 private:
  std::int64_t pick(std::int64_t least, std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>(least, most)(random_);
  }
  int ranks() { return static_cast<int>(pick(1, 3)); }

  void diverge(const fs::path& run, const configs::Config& good, std::int64_t step) {
    configs::Config bad = diverging(good, step + pick(1, 40));
    // Overflows at once, whatever the value.
    bad.mutable_train()->mutable_schedule()->set_learning_rate(
        std::pow(10.0f, static_cast<float>(pick(26, 34))));
    const std::int64_t stop = pick(0, 2) == 0 ? step + pick(1, 20) : -1;
    const Ended ended = train(run, bad, ranks(), [&](ToyTraining& training) {
      training.before_batch = [&training, stop](std::int64_t s) {
        if (s == stop) training.request_stop(SIGTERM);
      };
    });
    told_ += fmt::format("; at {} rate {}, to {}, stop {}: {}", step,
                         bad.train().schedule().learning_rate(), bad.train().steps(), stop,
                         static_cast<int>(ended.code));
    EXPECT_TRUE(ended.code == ExitCode::kNumerical ||
                (stop > 0 && ended.code == ExitCode::kRequeue))
        << told_ << ended.error;
  }

  void expect(ExitCode code, const Ended& ended, const std::string& what) {
    told_ += "; " + what;
    EXPECT_EQ(ended.code, code) << told_ << ": " << ended.error;
    EXPECT_TRUE(at::isfinite(ended.parameters).all().item<bool>()) << told_;
  }

  std::mt19937 random_;
  std::string told_;
};

// BIRKHOFF_HISTORIES sets how many, with seeds from BIRKHOFF_SEED on.
TEST(DivergenceHistories, DivergedAndRestartedWithTheCureARunGoesOn) {
  const char* count = std::getenv("BIRKHOFF_HISTORIES");
  const char* first = std::getenv("BIRKHOFF_SEED");
  const int num_histories = count != nullptr ? std::atoi(count) : 6;
  const auto seed = static_cast<unsigned>(first != nullptr ? std::atoi(first) : 1);
  int lost = 0;
  for (unsigned i = 0; i < static_cast<unsigned>(num_histories); ++i) {
    SCOPED_TRACE(fmt::format("history with BIRKHOFF_SEED={}", seed + i));
    const bool failed_before = testing::Test::HasFailure();
    testing::internal::CaptureStderr();
    const std::string told = History(seed + i).run();
    testing::internal::GetCapturedStderr();
    lost += !failed_before && testing::Test::HasFailure();
    std::cout << "seed " << seed + i << ": " << told << "\n";
  }
  std::cout << "histories: tried " << num_histories << ", lost " << lost << "\n";
}

}  // namespace
}  // namespace birkhoff
