// Cuts the saves of a training run at every call. Whatever the machine then loses of its page
// cache, the next job must resume from the newest reported checkpoint, or a newer one, and save
// again. BIRKHOFF_CRASH_STATES sets the approximate number of states over all tests.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>

#include "cluster/base/files/file.h"
#include "runtime/checkpoint/commit.h"
#include "runtime/checkpoint/run_folder.h"
#include "runtime/reporting/reporter.h"
#include "runtime/run_checkpoints.h"
#include "tests/cluster/base/thread_group.h"
#include "tests/crash/crash_trial.h"
#include "tests/runtime/checkpoint/checkpoint_fixture.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;

constexpr int kRanks = 2;
constexpr int kKeep = 2;
constexpr Layout kLayout = Layout::kFlatRanges;
// The version with the lowest held-out loss. It comes early in a job, so only keep_best keeps it.
constexpr std::int64_t kBestVersion = 4;

double loss_of(std::int64_t version) { return version == kBestVersion ? 1.0 : 2.0; }

// Each save of a run has a different version: the number of tokens in the header. The values of all
// tensors depend only on it.
std::int64_t version_of(const CheckpointFolder& checkpoint) { return checkpoint.manifest.tokens(); }

class SaveCrash : public testing::Test {
 protected:
  SaveCrash() { write_bytes(tokenizer_, "birkhoff chars 1\n"); }

  // Runs a job with the calls of runtime/train_run: opens the run, resumes, and saves `num_saves`
  // times; every third save repeats the previous step. Marks a version as soon as a rank knows that
  // it is committed.
  void run_job(const fs::path& root, int num_saves, bool keep_best = false) const {
    RunFolder run(root / "run", /*seed=*/1, /*fresh=*/false);
    const std::optional<CheckpointFolder> resume = run.find_resume_point();
    run_ranks(kRanks, [&](ProcessGroup& world) {
      CheckpointWriter writer(run.paths().checkpoints(), {kKeep, keep_best}, {tokenizer_}, world);
      std::vector<TensorPart> parts = make_parts(world.rank(), kRanks, kLayout);
      CheckpointHeader header = make_header(0);
      header.set_run(run.id());
      const Reporter reporter;
      RunCheckpoints checkpoints(&writer, world, header, parts, /*newest=*/std::nullopt,
                                 world.rank() == 0 ? &run : nullptr, reporter);
      TrainState state;
      state.step = resume ? resume->manifest.step() : 0;
      state.tokens = resume ? version_of(*resume) : 0;
      for (int save = 1; save <= num_saves; ++save) {
        ++state.tokens;
        if (save % 3 != 0) ++state.step;
        state.held_out_loss = loss_of(state.tokens);
        fill_parts(parts, state.tokens);
        checkpoints.save(state);
        fill_parts(parts, state.tokens + 1);  // training continues while the thread writes
        checkpoints.confirm();
        checkpoints.finish();
        mark_io(state.tokens);
      }
    });
  }

  // Runs the next job after a crash. promised: the version reported as committed; 0 if none was.
  std::string resumes_and_saves(const fs::path& root, std::int64_t promised) const {
    std::int64_t version = 0, step = 0;
    {
      RunFolder run(root / "run", 1, false);
      const auto newest = run.find_resume_point();
      if (newest) {
        version = version_of(*newest);
        step = newest->manifest.step();
        if (!holds(*newest, version)) return fmt::format("version {} has other values", version);
      }
      if (version < promised) {
        return fmt::format("resumes from version {}, though {} was committed", version, promised);
      }
      if (path_exists(run.paths().checkpoints().string())) {
        for (const std::string& name : names_in(run.paths().checkpoints())) {
          if (name.starts_with(kDamagedPrefix)) return name + " was set aside as damaged";
        }
      }
    }
    run_job(root, 1);
    const fs::path checkpoints = root / "run" / "checkpoints";
    const auto saved = find_newest_checkpoint(checkpoints, /*set_aside=*/true);
    if (!saved || saved->manifest.step() != step + 1 || !holds(*saved, version + 1)) {
      return "the next save is missing";
    }
    const std::vector<std::string> names = names_in(checkpoints);
    for (const std::string& name : names) {
      if (!name.starts_with(kStepPrefix)) return name + " is left over";
    }
    return names.size() > kKeep ? "more checkpoints than are kept" : "";
  }

  CrashTrial::Check check() const {
    return [this](const fs::path& root, const CrashState& state) {
      return resumes_and_saves(root, state.mark);
    };
  }

 private:
  static bool holds(const CheckpointFolder& checkpoint, std::int64_t version) {
    for (int rank = 0; rank < kRanks; ++rank) {
      std::vector<TensorPart> parts = make_parts(rank, kRanks, kLayout);
      load_checkpoint(checkpoint, parts);
      if (!differing_tensors(parts, version).empty()) return false;
    }
    return true;
  }

  const TestFolder elsewhere_;
  const fs::path tokenizer_ = elsewhere_.path() / "tokenizer.chars";
};

// Steps 1, 2, 2 again, 3, 4, 4 again, 5, 6; all but the last two are deleted.
constexpr int kSaves = 8;

TEST_F(SaveCrash, LosesNoCommittedCheckpoint) {
  const TestFolder root;
  const IoTrace trace = record_io(root, [&] { run_job(root, kSaves); });
  CrashTrial trial("crash states of saves", check());
  trial.run(trace, crash_states(trace, num_crash_states(240) / 2));
}

// With keep_best, a best checkpoint that was reported survives a crash and further saves.
TEST_F(SaveCrash, LosesNeitherTheNewestNorTheBest) {
  const TestFolder root;
  const IoTrace trace = record_io(root, [&] { run_job(root, kSaves, /*keep_best=*/true); });
  const auto holds_best = [](const fs::path& folder) {
    const auto all = list_checkpoints(folder / "run" / "checkpoints");
    return std::any_of(all.begin(), all.end(), [](const auto& step_and_path) {
      return version_of(open_checkpoint(step_and_path.second)) == kBestVersion;
    });
  };
  CrashTrial trial("crash states of saves with the best kept",
                   [&](const fs::path& folder, const CrashState& state) -> std::string {
                     const bool promised = state.mark >= kBestVersion;
                     if (promised && !holds_best(folder)) return "the best is gone";
                     std::int64_t version = 0;
                     {
                       RunFolder run(folder / "run", 1, false);
                       if (const auto newest = run.find_resume_point())
                         version = version_of(*newest);
                     }
                     if (version < state.mark) return "the newest is gone";
                     run_job(folder, 3, /*keep_best=*/true);
                     if (promised && !holds_best(folder))
                       return "the best is gone after more saves";
                     const auto names = names_in(folder / "run" / "checkpoints");
                     return names.size() > kKeep + 1 ? "more checkpoints than are kept" : "";
                   });
  trial.run(trace, crash_states(trace, num_crash_states(240) / 8));
}

// The job after a crash crashes again.
TEST_F(SaveCrash, LosesNoneIfTheNextJobCrashesToo) {
  const TestFolder root;
  const IoTrace first = record_io(root, [&] { run_job(root, kSaves); });
  const auto states = crash_states(first, SIZE_MAX);
  const std::size_t num_states = num_crash_states(240) / 4, num_first = num_states / 10;
  CrashTrial trial("crash states of saves after a crash", check());
  for (const std::size_t i : evenly_spaced(num_first, states.size())) {
    const TestFolder again;
    write_tree(states[i].tree, again);
    const IoTrace second = record_io(again, [&] {
      mark_io(states[i].mark);
      run_job(again, 3);
    });
    trial.run(second, crash_states(second, num_states / num_first));
  }
}

// The first job is killed, the next one saves, then the machine stops. The save must not rely on
// data that the first job left unsynced.
TEST_F(SaveCrash, LosesNoneAfterAKill) {
  const TestFolder root;
  const IoTrace killed = record_io(root, [&] { run_job(root, kSaves); });
  CrashTrial trial("crash states of saves after a kill", check());
  for (const std::size_t cut : kill_points(killed, num_crash_states(240) / 4 / 8)) {
    const TestFolder again;
    const IoTrace both = record_after_kill(killed, cut, again, [&] { run_job(again, 1); });
    trial.run(both, crash_states(both, SIZE_MAX, /*seed=*/1, first_promise(both, cut)));
  }
}

}  // namespace
}  // namespace birkhoff
