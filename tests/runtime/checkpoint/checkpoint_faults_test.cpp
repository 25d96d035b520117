// Checkpoints when things go wrong: every file call of a save fails, and the process is killed in
// the middle of saves.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <functional>
#include <optional>
#include <random>
#include <thread>

#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/checkpoint/commit.h"
#include "tests/cluster/base/faults.h"
#include "tests/cluster/base/tally.h"
#include "tests/cluster/base/thread_group.h"
#include "tests/runtime/checkpoint/checkpoint_fixture.h"

extern char** environ;

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

// Saves `step` with `num_ranks` ranks as threads and keeps one checkpoint; calls `disturb` once the
// writers exist. Returns the error, the same on all ranks; empty: saved.
std::string save_disturbed(const fs::path& folder, std::int64_t step, int num_ranks,
                           const std::function<void()>& disturb) {
  std::vector<std::string> errors(static_cast<std::size_t>(num_ranks));
  run_ranks(num_ranks, [&](ProcessGroup& world) {
    CheckpointWriter writer(folder, 1, {}, world);
    std::vector<TensorPart> parts = make_parts(world.rank(), num_ranks, Layout::kReplicated);
    fill_parts(parts, step);
    world.barrier("writers are there");
    if (world.rank() == 0) disturb();
    world.barrier("faults are set");
    try {
      writer.save(make_header(step), parts);
      writer.finish();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kStorage) << error.what();
      errors[static_cast<std::size_t>(world.rank())] = error.what();
    }
    world.barrier("no call runs");
  });
  for (const std::string& error : errors) {
    EXPECT_EQ(error, errors.front());
  }
  return errors.front();
}

// What must hold after a save of `step` next to step 1 was disturbed: the newest checkpoint is one
// of the two, intact, and the next job cleans up and saves.
void expect_nothing_lost(const fs::path& folder, std::int64_t step, int num_ranks) {
  testing::internal::CaptureStderr();
  const auto newest = find_newest_checkpoint(folder, true);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");  // neither was damaged
  ASSERT_TRUE(newest);
  EXPECT_TRUE(newest->manifest.step() == 1 || newest->manifest.step() == step);
  expect_holds_step(*newest, newest->manifest.step(), num_ranks);
  save_step(folder, step + 1, num_ranks);
  expect_holds_step(*find_newest_checkpoint(folder, true), step + 1);
}

// With step 1 saved, the save of `step` meets a fault at each call in turn, either at that call
// only or from it on.
void fail_every_call(const std::string& what, std::int64_t step, int num_ranks, bool only_once) {
  const TestFolder original;
  save_step(original, 1);
  std::int64_t num_calls = 0;
  {
    const TestFolder folder;
    fs::copy(original, folder, fs::copy_options::recursive);
    std::optional<Faults> none;
    save_disturbed(folder, step, num_ranks, [&] { none.emplace(kForever, kForever, EIO); });
    num_calls = none->num_calls();
  }
  ASSERT_GT(num_calls, 40);
  Tally tally("save, " + what);
  for (std::int64_t call = 0; call < num_calls; ++call) {
    for (const int error_number : errors_at(call)) {
      const TestFolder folder;
      fs::copy(original, folder, fs::copy_options::recursive);
      tally.attempt([&] {
        std::optional<Faults> faults;
        testing::internal::CaptureStderr();
        const std::string error = save_disturbed(folder, step, num_ranks, [&] {
          faults.emplace(call, only_once ? call : kForever, error_number);
        });
        const std::string warning = testing::internal::GetCapturedStderr();
        SCOPED_TRACE(testing::Message() << "call " << call << " of " << num_calls << ": "
                                        << faults->failed_call() << " " << faults->failed_path());
        // Ranks run at the same time, so a run may have a call more or less than the one that was
        // counted.
        ASSERT_TRUE(faults->happened() || call + 4 >= num_calls);
        const bool is_committed = error.empty();
        if (faults->happened() && is_committed) {
          faults->expect_told(warning.substr(0, warning.find('\n')));
          EXPECT_THAT(warning, HasSubstr("what no run needs any more is not removed: "));
        } else if (faults->happened()) {
          faults->expect_told(error);
          EXPECT_THAT(error, HasSubstr("rank "));
          EXPECT_THAT(error, HasSubstr("step-0000000" + std::to_string(step)));
          EXPECT_THAT(error, HasSubstr("start the same command again"));
        } else {
          EXPECT_EQ(error, "");
        }
        faults.reset();
        if (is_committed) {
          EXPECT_EQ(find_newest_checkpoint(folder, true)->manifest.step(), step);
        } else if (only_once) {
          for (const std::string& name : names_in(folder)) {
            EXPECT_TRUE(name.starts_with(kStepPrefix) || name.starts_with(kReplacedPrefix))
                << "left aside: " << name;
          }
        }
        expect_nothing_lost(folder, step, num_ranks);
      });
    }
  }
}

TEST(CheckpointFaults, EveryCallFailsOnce) { fail_every_call("one rank, once", 2, 1, true); }
TEST(CheckpointFaults, EveryCallFailsOnceOnTwoRanks) {
  fail_every_call("two ranks, once", 2, 2, true);
}
TEST(CheckpointFaults, EveryCallFailsOnceWhileAStepIsReplaced) {
  fail_every_call("a step that is there, once", 1, 1, true);
}
TEST(CheckpointFaults, EveryCallFailsFromSomePointOn) {
  fail_every_call("one rank, from there on", 2, 1, false);
}

// As on NFS while another process reads a file in it, or if the folder is a mount point.
TEST(CheckpointFaults, AnOldCheckpointThatCannotBeRemovedEndsNoRun) {
  for (const auto& [failing, error] :
       {std::pair("rmdir", ENOTEMPTY), std::pair("unlink", ESTALE), std::pair("rename", EBUSY)}) {
    SCOPED_TRACE(failing);
    const TestFolder folder;
    constexpr int kKept = 2;
    const auto save = [&](std::int64_t step) {
      testing::internal::CaptureStderr();
      save_step(folder, step, 1, Layout::kReplicated, kKept);
      return testing::internal::GetCapturedStderr();
    };
    save(1);
    set_file_fault_hook(
        [call = failing, number = error](const char* name, const std::string& path, std::int64_t) {
          const bool is_old = path.ends_with("step-00000001") ||
                              path.find("old-step-00000001") != std::string::npos;
          return is_old && std::string_view(name) == call ? number : 0;
        });
    for (std::int64_t step = 2; step <= 5; ++step) {
      const std::string warning = save(step);
      EXPECT_EQ(find_newest_checkpoint(folder, true)->manifest.step(), step);
      if (step <= kKept) continue;
      EXPECT_THAT(warning, HasSubstr(std::string(failing) + " of '"));
      EXPECT_THAT(warning, HasSubstr("the next save or start tries again"));
    }
    set_file_fault_hook({});
    EXPECT_EQ(save(6), "");
    EXPECT_THAT(names_in(folder), testing::Each(testing::StartsWith("step-")));
    EXPECT_EQ(names_in(folder).size(), kKept);
  }
}

TEST(CheckpointFaults, InterruptedCallsAreRepeatedAndShortOnesContinued) {
  for (const int num_ranks : {1, 2}) {
    const TestFolder folder;
    std::optional<Disturbances> disturbances;
    EXPECT_EQ(save_disturbed(folder, 2, num_ranks, [&] { disturbances.emplace(); }), "");
    EXPECT_GT(disturbances->num_interrupted(), 100);
    disturbances.reset();
    expect_holds_step(*find_newest_checkpoint(folder, true), 2);
  }
}

// The system's own limit instead of a simulated error: a write ends short, the next one fails.
TEST(CheckpointFaults, FilesThatMayNotGrow) {
  const TestFolder original;
  save_step(original, 1);
  Tally tally("save under limits of file sizes");
  std::string error = "some";
  for (rlim_t limit = 0; !error.empty(); limit += all_faults() ? 7 : 101) {
    tally.attempt([&] {
      const TestFolder folder;
      fs::copy(original, folder, fs::copy_options::recursive);
      std::optional<FileSizeLimit> limited;
      error = save_disturbed(folder, 2, 2, [&] { limited.emplace(limit); });
      limited.reset();
      if (!error.empty()) {
        EXPECT_THAT(error, HasSubstr("write of '"));
        EXPECT_THAT(error, HasSubstr("File too large"));
        EXPECT_THAT(error, HasSubstr("ulimit -f"));
      }
      expect_nothing_lost(folder, 2, 2);
    });
  }
  EXPECT_GT(tally.tried(), 10);
}

// ------------------------------------------------------------------------------------------------
// kill -9
constexpr char kFolderVariable[] = "BIRKHOFF_TEST_KILLED_FOLDER";

// KilledInTheMidstOfSaves runs it as a separate process: resumes and saves step after step until it
// is killed.
TEST(CheckpointFaults, DISABLED_SaveUntilKilled) {
  const fs::path folder = std::getenv(kFolderVariable);
  run_ranks(2, [&](ProcessGroup& world) {
    std::int64_t step = 0;
    if (world.rank() == 0) {
      if (const auto newest = find_newest_checkpoint(folder, true)) {
        step = newest->manifest.step();
      }
    }
    step = std::stoll(world.broadcast_bytes(std::to_string(step), 0, "step"));
    CheckpointWriter writer(folder, 2, {}, world);
    std::vector<TensorPart> parts = make_parts(world.rank(), 2, Layout::kFlatRanges);
    while (true) {
      // Every third save repeats the same step: replacing is the hardest commit.
      fill_parts(parts, ++step);
      for (int repeat = 0; repeat < (step % 3 == 0 ? 2 : 1); ++repeat) {
        writer.save(make_header(step), parts);
        writer.finish();
      }
    }
  });
}

pid_t start_saving_process() {
  char self[4096] = "";
  if (::readlink("/proc/self/exe", self, sizeof(self) - 1) < 0) {
    return -1;
  }
  std::string filter = "--gtest_filter=CheckpointFaults.DISABLED_SaveUntilKilled";
  std::string disabled = "--gtest_also_run_disabled_tests", brief = "--gtest_brief=1";
  char* arguments[] = {self, filter.data(), disabled.data(), brief.data(), nullptr};
  pid_t child = -1;
  return ::posix_spawn(&child, self, nullptr, nullptr, arguments, environ) == 0 ? child : -1;
}

TEST(CheckpointFaults, KilledInTheMidstOfSaves) {
  const TestFolder folder;
  ::setenv(kFolderVariable, folder.path().c_str(), 1);
  std::mt19937 random(1);
  std::int64_t step = 0;
  int unfinished = 0;
  for (int round = 0; round < 20; ++round) {
    const pid_t child = start_saving_process();
    ASSERT_GT(child, 0);
    // Wait for its first commit, then let it run for a random time.
    const auto newest_step = [&] {
      const auto folders = list_checkpoints(folder);
      return folders.empty() ? 0 : folders.rbegin()->first;
    };
    for (int i = 0; i < 10000 && newest_step() == step; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 30000));
    ASSERT_EQ(::kill(child, SIGKILL), 0);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << "it ended by itself";
    for (const std::string& name : names_in(folder)) {
      unfinished += name.starts_with(kAsidePrefix);
      EXPECT_FALSE(name.starts_with(kDamagedPrefix));
    }
    testing::internal::CaptureStderr();
    const auto newest = find_newest_checkpoint(folder, true);
    EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
    ASSERT_TRUE(newest);
    EXPECT_GT(newest->manifest.step(), step);
    step = newest->manifest.step();
    expect_holds_step(*newest, step, 3, Layout::kColumns);
  }
  EXPECT_GE(unfinished, 5);  // some kills hit a save in progress
  ::unsetenv(kFolderVariable);
}

// A file that cannot be read now may be intact: nothing is renamed, and no older checkpoint is
// used.
TEST(CheckpointFaults, AReadThatFailsIsNoDamage) {
  const TestFolder folder;
  for (const std::int64_t step : {1, 2}) save_step(folder, step);
  const std::vector<std::string> names = names_in(folder);
  for (const int error : {EACCES, EIO, EMFILE, ESTALE, ENOMEM}) {
    for (const char* failing : {"open", "read", "pread"}) {
      set_file_fault_hook([&](const char* call, const std::string& path, std::int64_t) {
        return std::string(call) == failing && path.find("step-00000002") != std::string::npos
                   ? error
                   : 0;
      });
      try {
        find_newest_checkpoint(folder, /*set_aside=*/true);
        ADD_FAILURE() << failing << " may fail unseen";
      } catch (const Error& seen) {
        EXPECT_EQ(seen.code(), ExitCode::kStorage) << seen.what();
      }
      set_file_fault_hook({});
      EXPECT_EQ(names_in(folder), names) << failing << " " << error;
    }
  }
}

}  // namespace
}  // namespace birkhoff
