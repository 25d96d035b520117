// Checkpoints when things go wrong: every file call of a save fails once, every byte of a
// checkpoint is flipped, every file is cut at every length, and the process is killed in the midst
// of saves.
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <functional>
#include <mutex>
#include <random>
#include <thread>

#include "cluster/base/error.h"
#include "cluster/base/file.h"
#include "cluster/base/thread_group.h"
#include "runtime/checkpoint.h"
#include "runtime/checkpoint_folder.h"
#include "runtime/checkpoint_manifest.h"
#include "tests/runtime/checkpoint_fixture.h"

extern char** environ;

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

// While it lives, file calls number first, first + 1, ..., last (0 is the next one) fail with
// `error`.
class Faults {
 public:
  Faults(std::int64_t first, std::int64_t last, int error) {
    set_file_fault_hook(
        [this, first, last, error](const char* call, const std::string& path, std::int64_t) {
          const std::lock_guard lock(mutex_);
          const std::int64_t number = num_calls_++;
          if (number < first || number > last) {
            return 0;
          }
          if (failed_path_.empty()) {
            failed_call_ = call;
            failed_path_ = path;
          }
          return error;
        });
  }
  ~Faults() { set_file_fault_hook({}); }
  Faults(const Faults&) = delete;
  Faults& operator=(const Faults&) = delete;

  std::int64_t num_calls() const { return num_calls_; }
  const std::string& failed_call() const { return failed_call_; }  // the first; empty if none was
  const std::string& failed_path() const { return failed_path_; }

 private:
  std::mutex mutex_;
  std::int64_t num_calls_ = 0;
  std::string failed_call_, failed_path_;
};

struct Outcome {
  std::string error;  // the same on all ranks; empty: saved
  std::string failed_call, failed_path;
  std::int64_t num_calls = 0;
};

// Saves `step` and keeps one checkpoint; file calls first ... last behind the writer's start fail.
Outcome save_with_faults(const fs::path& folder, std::int64_t step, int num_ranks,
                         std::int64_t first, std::int64_t last, int error_number) {
  Outcome outcome;
  std::unique_ptr<Faults> faults;
  std::vector<std::string> errors(static_cast<std::size_t>(num_ranks));
  run_ranks(num_ranks, [&](Group& world) {
    CheckpointWriter writer(folder, 1, {}, world);
    std::vector<NamedShard> shards = make_shards(world.rank(), num_ranks, Layout::kReplicated);
    fill_shards(shards, step);
    world.barrier("writers are there");
    if (world.rank() == 0) {
      faults = std::make_unique<Faults>(first, last, error_number);
    }
    world.barrier("faults are set");
    try {
      writer.save(make_header(step), shards);
      writer.finish();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kStorage) << error.what();
      errors[static_cast<std::size_t>(world.rank())] = error.what();
    }
    world.barrier("no call runs");
    if (world.rank() == 0) {
      outcome = {"", faults->failed_call(), faults->failed_path(), faults->num_calls()};
      faults.reset();
    }
  });
  for (const std::string& error : errors) {
    EXPECT_EQ(error, errors.front());
  }
  outcome.error = errors.front();
  return outcome;
}

constexpr std::int64_t kNever = -1;
constexpr std::int64_t kForever = INT64_MAX;

// Step 1 is there; the save of `step` meets a fault at one call after the other. Whatever happens,
// the newest checkpoint is step 1 or the new one, whole, and the error says where it failed.
void fail_every_call(std::int64_t step, int num_ranks, bool only_once, int error_number) {
  const TestFolder original;
  save_step(original, 1);
  std::int64_t num_calls;
  {
    const TestFolder folder;
    fs::copy(original, folder, fs::copy_options::recursive);
    num_calls = save_with_faults(folder, step, num_ranks, kNever, kNever, 0).num_calls;
  }
  ASSERT_GT(num_calls, 40);
  for (std::int64_t call = 0; call < num_calls; ++call) {
    const TestFolder folder;
    fs::copy(original, folder, fs::copy_options::recursive);
    const Outcome outcome =
        save_with_faults(folder, step, num_ranks, call, only_once ? call : kForever, error_number);
    SCOPED_TRACE(testing::Message() << "call " << call << " of " << num_calls << ": "
                                    << outcome.failed_call << " " << outcome.failed_path);
    // Ranks run at the same time, so that a run may have a call more or less than the one that was
    // counted.
    ASSERT_TRUE(!outcome.failed_call.empty() || call + 4 >= num_calls);
    if (!outcome.failed_call.empty()) {
      EXPECT_THAT(outcome.error, HasSubstr(outcome.failed_path));
      EXPECT_THAT(outcome.error, HasSubstr("rank "));
      EXPECT_THAT(outcome.error, HasSubstr("step-0000000" + std::to_string(step)));
      EXPECT_EQ(outcome.error.find('\n'), std::string::npos);
    }
    if (!outcome.failed_call.empty() && only_once) {
      for (const std::string& name : names_in(folder)) {
        EXPECT_THAT(name, HasSubstr("step-")) << outcome.error;
        EXPECT_FALSE(name.starts_with(kAsidePrefix)) << "left aside: " << name;
      }
    }
    testing::internal::CaptureStderr();
    const auto newest = find_newest_checkpoint(folder, true);
    EXPECT_EQ(testing::internal::GetCapturedStderr(), "");  // none was damaged
    ASSERT_TRUE(newest);
    EXPECT_TRUE(newest->manifest.step() == 1 || newest->manifest.step() == step);
    expect_holds_step(*newest, newest->manifest.step(), num_ranks);
    // The next job cleans up and saves.
    save_step(folder, step + 1, num_ranks);
    expect_holds_step(*find_newest_checkpoint(folder, true), step + 1);
  }
}

TEST(CheckpointFaults, EveryCallFailsOnce) { fail_every_call(2, 1, true, EIO); }
TEST(CheckpointFaults, EveryCallFailsOnceOnTwoRanks) { fail_every_call(2, 2, true, EIO); }
TEST(CheckpointFaults, EveryCallFailsOnceWhileAStepIsReplaced) { fail_every_call(1, 1, true, EIO); }
TEST(CheckpointFaults, EveryCallFailsFromSomePointOn) { fail_every_call(2, 1, false, ENOSPC); }

TEST(CheckpointFaults, ShortTransfersAreContinued) {
  const TestFolder folder;
  EXPECT_EQ(save_with_faults(folder, 2, 1, 0, kForever, kShortTransfer).error, "");
  expect_holds_step(*find_newest_checkpoint(folder, true), 2);
}

// Changes files of a checkpoint and expects each change to be found, in an error that names the
// file.
class DamagedCheckpoint : public testing::Test {
 protected:
  DamagedCheckpoint() {
    run_ranks(1, [&](Group& world) {
      CheckpointWriter writer(folder_, 1, {}, world);
      std::vector<NamedShard> shards = make_shards(0, 1, Layout::kReplicated);
      shards.erase(shards.begin(), shards.begin() + 3);  // small, so that every byte can be tried
      fill_shards(shards, 1);
      writer.save(make_header(1), shards);
      writer.finish();
    });
    checkpoint_ = folder_.path() / step_name(1);
  }

  void expect_found(const fs::path& file, const std::string& damaged) {
    write_bytes(file, damaged);
    try {
      verify_checkpoint(open_checkpoint(checkpoint_));
      ADD_FAILURE() << "was not found";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kCheckpoint) << error.what();
      EXPECT_THAT(error.what(), HasSubstr(file.string()));
    }
  }

  // change(good bytes, i) for i = 0 ... size - 1, of every file.
  void for_every_byte(const std::function<std::string(const std::string&, std::size_t)>& change) {
    int num_files = 0;
    for (const std::string& name : names_in(checkpoint_)) {
      const fs::path file = checkpoint_ / name;
      const std::string good = read_bytes(file);
      for (std::size_t i = 0; i < good.size(); ++i) {
        SCOPED_TRACE(testing::Message() << name << ", byte " << i);
        expect_found(file, change(good, i));
      }
      write_bytes(file, good);
      ++num_files;
    }
    EXPECT_EQ(num_files, 4);
    EXPECT_NO_THROW(verify_checkpoint(open_checkpoint(checkpoint_)));
  }

  TestFolder folder_;
  fs::path checkpoint_;
};

TEST_F(DamagedCheckpoint, EveryFlippedByteIsFound) {
  for_every_byte([](std::string bytes, std::size_t i) {
    bytes[i] = static_cast<char>(bytes[i] ^ (1 << (i % 8)));
    return bytes;
  });
}

TEST_F(DamagedCheckpoint, EveryTruncationIsFound) {
  for_every_byte([](const std::string& bytes, std::size_t i) { return bytes.substr(0, i); });
}

TEST_F(DamagedCheckpoint, AppendedAndMissingFilesAreFound) {
  for (const std::string& name : names_in(checkpoint_)) {
    const fs::path file = checkpoint_ / name;
    const std::string good = read_bytes(file);
    expect_found(file, good + '\0');
    expect_found(file, good + "\n");
    fs::remove(file);
    try {
      open_checkpoint(checkpoint_);
      ADD_FAILURE() << name << " is not missed";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kCheckpoint);
      EXPECT_THAT(error.what(), HasSubstr(name));
    }
    write_bytes(file, good);
  }
}

// Manifests that pass their checksum and mean harm.
TEST_F(DamagedCheckpoint, ManifestsThatLieAreRefused) {
  using Manifest = configs::CheckpointManifest;
  const std::vector<std::function<void(Manifest&)>> lies = {
      [](Manifest& m) { m.set_format("else"); },
      [](Manifest& m) { m.set_ranks(0); },
      [](Manifest& m) { m.set_step(-1); },
      [](Manifest& m) { m.set_consumed(-1); },
      [](Manifest& m) { m.set_tokens(INT64_MIN); },
      [](Manifest& m) { m.set_metrics_bytes(-1); },
      [](Manifest& m) { m.mutable_file(0)->set_name("../../etc/passwd"); },
      [](Manifest& m) { m.mutable_file(0)->set_name(".."); },
      [](Manifest& m) { m.mutable_file(0)->set_name(""); },
      [](Manifest& m) { m.mutable_file(0)->set_name("/etc/passwd"); },
      [](Manifest& m) { m.mutable_file(0)->set_name(kManifestName); },
      [](Manifest& m) { m.mutable_file(0)->set_bytes(-1); },
      [](Manifest& m) { m.mutable_file(0)->set_bytes(INT64_MAX); },
      [](Manifest& m) { m.mutable_file(0)->set_hash("0"); },
      [](Manifest& m) { m.mutable_file(0)->mutable_hash()->at(0) ^= 1; },
      [](Manifest& m) { *m.add_file() = m.file(0); },
      [](Manifest& m) { *m.add_tensor() = m.tensor(0); },
      [](Manifest& m) { m.mutable_tensor(0)->set_name(""); },
      [](Manifest& m) { m.mutable_tensor(0)->set_kind("thing"); },
      [](Manifest& m) { m.mutable_tensor(0)->set_dtype("F16"); },
      [](Manifest& m) { m.mutable_tensor(0)->set_dtype("I64"); },
      [](Manifest& m) { m.mutable_tensor(0)->set_file("other"); },
      [](Manifest& m) { m.mutable_tensor(0)->set_key("other"); },
      [](Manifest& m) { m.mutable_tensor(0)->set_global_shape(0, 1000000); },
      [](Manifest& m) { m.mutable_tensor(0)->set_global_shape(0, INT64_MAX); },
      [](Manifest& m) { m.mutable_tensor(0)->set_global_shape(0, -4); },
      [](Manifest& m) { m.mutable_tensor(0)->add_global_shape(INT64_MAX); },
      [](Manifest& m) { m.mutable_tensor(0)->set_box_offset(0, 1); },
      [](Manifest& m) { m.mutable_tensor(0)->clear_box_size(); },
      [](Manifest& m) { m.mutable_tensor(0)->set_flat_end(1); },
      [](Manifest& m) { m.mutable_tensor(0)->set_flat_end(INT64_MAX); },
      [](Manifest& m) { m.mutable_tensor(0)->set_flat_begin(-1); },
      [](Manifest& m) { m.mutable_tensor(0)->set_crc32c(m.tensor(0).crc32c() ^ 1); },
      [](Manifest& m) { m.mutable_tensor()->RemoveLast(); },
  };
  const std::string path = (checkpoint_ / kManifestName).string();
  const std::string good = read_bytes(path);
  for (std::size_t i = 0; i < lies.size(); ++i) {
    Manifest manifest = parse_checkpoint_manifest(good, path);
    lies[i](manifest);
    write_bytes(path, manifest_text(manifest));
    try {
      verify_checkpoint(open_checkpoint(checkpoint_));
      ADD_FAILURE() << "lie " << i << " was believed";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kCheckpoint) << i << ": " << error.what();
      EXPECT_THAT(error.what(), HasSubstr(checkpoint_.string()));
    }
  }
}

// ------------------------------------------------------------------------------------------------
// kill -9
constexpr char kFolderVariable[] = "BIRKHOFF_TEST_KILLED_FOLDER";

// Run by KilledInTheMidstOfSaves as a process of its own: resumes and saves step after step until
// it is killed.
TEST(CheckpointFaults, DISABLED_SaveUntilKilled) {
  const fs::path folder = std::getenv(kFolderVariable);
  run_ranks(2, [&](Group& world) {
    std::int64_t step = 0;
    if (world.rank() == 0) {
      if (const auto newest = find_newest_checkpoint(folder, true)) {
        step = newest->manifest.step();
      }
    }
    step = std::stoll(world.broadcast_bytes(std::to_string(step), 0, "step"));
    CheckpointWriter writer(folder, 2, {}, world);
    std::vector<NamedShard> shards = make_shards(world.rank(), 2, Layout::kFlatRanges);
    while (true) {
      // Every third save is of the same step again: replacing is the hardest commit.
      fill_shards(shards, ++step);
      for (int repeat = 0; repeat < (step % 3 == 0 ? 2 : 1); ++repeat) {
        writer.save(make_header(step), shards);
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
    // Wait for its first commit, then let it go on for a random while.
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
  EXPECT_GE(unfinished, 5);  // some kills hit the midst of a save
  ::unsetenv(kFolderVariable);
}

// What cannot be read now may be sound: nothing is renamed, and no older checkpoint is used.
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
