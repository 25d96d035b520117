#include "runtime/checkpoint/run_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <functional>
#include <regex>
#include <thread>

#include "cluster/base/error.h"
#include "runtime/reporting/reporter.h"
#include "runtime/run_checkpoints.h"
#include "runtime/run_checks.h"
#include "tests/cluster/base/faults.h"
#include "tests/cluster/base/tally.h"
#include "tests/cluster/base/thread_group.h"
#include "tests/runtime/checkpoint/checkpoint_fixture.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

std::string error_of(ExitCode code, const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return "";
}

// Saves a checkpoint of the run with identity `id`.
void save_for(const RunFolder& run, const std::string& id, std::int64_t step) {
  run_ranks(1, [&](ProcessGroup& world) {
    CheckpointWriter writer(run.paths().checkpoints(), 2, {}, world);
    CheckpointHeader header = make_header(step);
    header.set_run(id);
    writer.save(header, make_parts(0, 1, Layout::kReplicated));
    writer.finish();
  });
}

TEST(RunFolder, IsCreatedWithParentsAndKeepsItsIdentity) {
  const TestFolder folder;
  const fs::path path = folder.path() / "a" / "b";
  std::string id;
  {
    const RunFolder run(path, 7, false);
    id = run.id();
    EXPECT_EQ(id.size(), 32u);
    EXPECT_THAT(names_in(path), ElementsAre("holder-1", "lock", "run.json"));
    EXPECT_EQ(run.paths().log(3), path / "log" / "rank-3.log");
  }
  EXPECT_EQ(RunFolder(path, 8, false).id(), id);
  EXPECT_NE(RunFolder(folder.path() / "c", 7, false).id(), id);
}

TEST(RunFolder, RefusesAForeignFolder) {
  const TestFolder folder;
  write_bytes(folder.path() / "thesis.tex", "precious");
  for (const bool fresh : {false, true}) {
    EXPECT_THAT(error_of(ExitCode::kUsage, [&] { RunFolder(folder, 1, fresh); }),
                AllOf(HasSubstr(folder.path().string()), HasSubstr("not the folder of a run"),
                      HasSubstr("--run")));
  }
  EXPECT_THAT(names_in(folder), ElementsAre("thesis.tex"));
  EXPECT_THAT(
      error_of(ExitCode::kUsage, [&] { RunFolder(folder.path() / "thesis.tex", 1, false); }),
      HasSubstr("not a folder"));
}

TEST(RunFolder, ACrashAtTheVeryStartIsNoForeignFolder) {
  const TestFolder folder;
  write_bytes(folder.path() / "lock", "process 1 on nowhere");
  EXPECT_NO_THROW(RunFolder(folder, 1, false));
}

TEST(RunFolder, ACrashWhileAnEarlierRunIsSetAsideIsNoForeignFolder) {
  const TestFolder folder;
  { const RunFolder run(folder, 1, false); }
  fs::create_directory(folder.path() / "before-fresh-1");
  fs::rename(folder.path() / "run.json", folder.path() / "before-fresh-1" / "run.json");
  EXPECT_NO_THROW(RunFolder(folder, 1, true));
  EXPECT_TRUE(fs::exists(folder.path() / "before-fresh-1" / "run.json"));
}

TEST(RunFolder, RemovesWhatKilledWritersLeft) {
  const TestFolder folder;
  { const RunFolder run(folder, 1, false); }
  for (const char* name :
       {"run.json.tmp-1", "loss.svg.tmp-22", "metrics.jsonl.tmp-333", "holder-1.tmp-4"}) {
    write_bytes(folder.path() / name, "half");
  }
  write_bytes(folder.path() / "notes.tmp-1", "the user's");
  const RunFolder run(folder, 1, false);
  EXPECT_THAT(names_in(folder), ElementsAre("holder-2", "lock", "notes.tmp-1", "run.json"));
}

// Lustre without the mount option flock, NFS without lockd.
TEST(RunFolder, WithoutLocksTheLeaseGuardsIt) {
  const TestFolder folder;
  set_file_fault_hook([](const char* call, const std::string&, std::int64_t) {
    return std::string_view(call) == "flock" ? ENOSYS : 0;
  });
  testing::internal::CaptureStderr();
  {
    const RunFolder run(folder, 1, false);
    EXPECT_THAT(testing::internal::GetCapturedStderr(),
                AllOf(HasSubstr("has no locks (flock)"), HasSubstr("Lustre: flock")));
    EXPECT_THAT(read_bytes(folder.path() / "holder-1"), HasSubstr("\"held\":true"));
  }
  EXPECT_THAT(read_bytes(folder.path() / "holder-1"), HasSubstr("\"held\":false"));
  EXPECT_EQ(run_holder(RunPaths{folder.path()}), std::nullopt);
  set_file_fault_hook({});
}

// A save that begins before the trainer has polled the previous one commits that one.
TEST(RunFolder, KnowsOfACheckpointThatALaterSaveCommits) {
  const TestFolder folder;
  {
    RunFolder run(folder, 1, false);
    run_ranks(1, [&](ProcessGroup& world) {
      CheckpointWriter writer(run.paths().checkpoints(), 2, {}, world);
      CheckpointHeader header = make_header(0);
      header.set_run(run.id());
      const Reporter reporter;
      RunCheckpoints checkpoints(&writer, world, header, make_parts(0, 1, Layout::kReplicated),
                                 /*newest=*/std::nullopt, &run, reporter);
      TrainState state;
      testing::internal::CaptureStderr();
      for (state.step = 1; state.step <= 2; ++state.step) checkpoints.save(state);
      EXPECT_THAT(testing::internal::GetCapturedStderr(),
                  testing::ContainsRegex(
                      "saved step 1: stall [0-9.]+ ms, written in [0-9]+[.][0-9][0-9] s\n$"));
    });
  }
  EXPECT_THAT(read_bytes(folder.path() / "run.json"), HasSubstr("\"has_checkpoint\":true"));
  // A commit whose note was lost in a crash is noted when the checkpoint is found.
  write_bytes(folder.path() / "run.json", std::regex_replace(read_bytes(folder.path() / "run.json"),
                                                             std::regex("true"), "false"));
  ASSERT_TRUE(RunFolder(folder, 1, false).find_resume_point());
  fs::remove_all(folder.path() / "checkpoints");
  EXPECT_THAT(
      error_of(ExitCode::kCheckpoint, [&] { RunFolder(folder, 1, false).find_resume_point(); }),
      HasSubstr("none is left"));
}

TEST(RunFolder, IsLockedAgainstOtherProcesses) {
  const TestFolder folder;
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const RunFolder run(folder, 1, false);
    (void)!::write(ready[1], "x", 1);
    ::pause();
    ::_exit(0);
  }
  char byte;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  EXPECT_THAT(error_of(ExitCode::kUsage, [&] { RunFolder(folder, 1, false); }),
              AllOf(HasSubstr(folder.path().string()),
                    HasSubstr("process " + std::to_string(child)), HasSubstr(" on ")));
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  ::close(ready[0]);
  ::close(ready[1]);
  EXPECT_NO_THROW(RunFolder(folder, 1, false));  // a lock ends with its process, however that ended
}

TEST(RunFolder, DamagedIdentityIsRefusedByName) {
  const TestFolder folder;
  { const RunFolder run(folder, 1, false); }
  const std::string good = read_bytes(folder.path() / "run.json");
  std::vector<std::string> bad = {"",
                                  "[]",
                                  "null",
                                  "{}",
                                  "{\"format\":\"birkhoff run\"}",
                                  std::string(100000, '['),
                                  std::string(70000, ' ')};
  for (std::size_t length = 0; length + 2 < good.size(); ++length) {
    bad.push_back(good.substr(0, length));
  }
  for (const std::string& text : bad) {
    write_bytes(folder.path() / "run.json", text);
    EXPECT_THAT(error_of(ExitCode::kCheckpoint, [&] { RunFolder(folder, 1, false); }),
                HasSubstr("run.json"));
  }
}

TEST(RunFolder, FreshMovesTheOldRunAsideAndLosesNothing) {
  const TestFolder folder;
  std::string id;
  for (const char* content : {"first", "second"}) {
    {
      const RunFolder run(folder, 1, std::string(content) == "second");
      EXPECT_NE(run.id(), id);
      id = run.id();
      save_for(run, run.id(), 5);
    }
    write_bytes(folder.path() / "metrics.jsonl", content);
  }
  { const RunFolder run(folder, 1, true); }
  EXPECT_THAT(names_in(folder),
              ElementsAre("before-fresh-1", "before-fresh-2", "holder-3", "lock", "run.json"));
  EXPECT_EQ(read_bytes(folder.path() / "before-fresh-1" / "metrics.jsonl"), "first");
  EXPECT_EQ(read_bytes(folder.path() / "before-fresh-2" / "metrics.jsonl"), "second");
  EXPECT_TRUE(fs::exists(folder.path() / "before-fresh-2" / "checkpoints" / "step-00000005"));
}

TEST(RunFolder, ResumesWhereItsCheckpointsSay) {
  const TestFolder folder;
  RunFolder run(folder, 1, false);
  EXPECT_FALSE(run.find_resume_point());
  save_for(run, run.id(), 3);
  run.note_checkpoint();
  EXPECT_EQ(run.find_resume_point()->manifest.step(), 3);
}

TEST(RunFolder, NeverStartsAfreshByItself) {
  const TestFolder folder;
  {
    RunFolder run(folder, 1, false);
    save_for(run, run.id(), 3);
    run.note_checkpoint();
    fs::remove_all(run.paths().checkpoints());
  }
  RunFolder run(folder, 1, false);
  EXPECT_THAT(error_of(ExitCode::kCheckpoint, [&] { run.find_resume_point(); }),
              AllOf(HasSubstr("had checkpoints and none is left"), HasSubstr("--fresh")));
}

TEST(RunFolder, RefusesAnotherRunsCheckpoint) {
  const TestFolder folder;
  RunFolder run(folder, 1, false);
  save_for(run, "another", 3);
  EXPECT_THAT(error_of(ExitCode::kCheckpoint, [&] { run.find_resume_point(); }),
              AllOf(HasSubstr("step-00000003"), HasSubstr("another"), HasSubstr(run.id())));
  EXPECT_TRUE(fs::exists(run.paths().checkpoints() / "step-00000003"));
}

// Every file call of `story` fails once: one error reports it, and the same story then succeeds.
// `before` prepares a new folder for the story; `after` checks the folder at the end.
void fail_every_call(const std::string& what, const std::function<void(const fs::path&)>& before,
                     const std::function<void(const fs::path&)>& story,
                     const std::function<void(const fs::path&)>& after) {
  Tally tally("run folder, " + what);
  bool happened = true;
  for (std::int64_t call = 0; happened; ++call) {
    for (const int error_number : errors_at(call)) {
      tally.attempt([&] {
        const TestFolder folder;
        before(folder);
        std::string error;
        {
          const Faults faults(call, call, error_number);
          try {
            story(folder);
          } catch (const Error& failure) {
            EXPECT_EQ(failure.code(), ExitCode::kStorage) << failure.what();
            error = failure.what();
          }
          happened = faults.happened();
          if (happened) faults.expect_told(error);
        }
        if (happened) story(folder);
        after(folder);
      });
    }
  }
  EXPECT_GT(tally.tried(), 10);
}

TEST(RunFolder, EveryCallMayFail) {
  const auto start = [](const fs::path& folder) {
    RunFolder run(folder / "run", 1, false);
    EXPECT_FALSE(run.find_resume_point());
  };
  fail_every_call(
      "a new run", [](const fs::path&) {}, start,
      [](const fs::path& folder) {
        EXPECT_THAT(names_in(folder / "run"),
                    ElementsAre(testing::StartsWith("holder-"), "lock", "run.json"));
      });

  std::string id;
  const auto trained = [&](const fs::path& folder) {
    RunFolder run(folder / "run", 1, false);
    id = run.id();
    save_for(run, id, 3);
    write_bytes(run.paths().metrics(), "{1}\n{2}\n");
  };
  const auto resume = [&](const fs::path& folder) {
    RunFolder run(folder / "run", 1, false);
    ASSERT_EQ(run.find_resume_point()->manifest.step(), 3);
    run.note_checkpoint();
    run.cut_metrics(4);
  };
  fail_every_call("resumed", trained, resume, [&](const fs::path& folder) {
    EXPECT_EQ(RunFolder(folder / "run", 1, false).id(), id);
    EXPECT_EQ(read_bytes(folder / "run" / "metrics.jsonl"), "{1}\n");
    EXPECT_THAT(read_bytes(folder / "run" / "run.json"), HasSubstr("\"has_checkpoint\":true"));
  });

  const auto fresh = [](const fs::path& folder) { RunFolder(folder / "run", 1, true); };
  fail_every_call("fresh", trained, fresh, [](const fs::path& folder) {
    bool has_metrics = false, has_checkpoint = false;
    for (const auto& entry : fs::recursive_directory_iterator(folder / "run")) {
      has_metrics |= entry.path().filename() == "metrics.jsonl";
      has_checkpoint |= entry.path().filename() == "step-00000003";
    }
    EXPECT_TRUE(has_metrics && has_checkpoint) << "lost";
    EXPECT_FALSE(fs::exists(folder / "run" / "metrics.jsonl"));
    EXPECT_FALSE(RunFolder(folder / "run", 1, false).find_resume_point());
  });
}

TEST(RunFolder, MetricsAreCutToWholeLines) {
  const TestFolder folder;
  const RunFolder run(folder, 1, false);
  run.cut_metrics(10);  // no metrics yet
  const auto cut = [&](const std::string& text, std::int64_t bytes) {
    write_bytes(run.paths().metrics(), text);
    run.cut_metrics(bytes);
    return read_bytes(run.paths().metrics());
  };
  EXPECT_EQ(cut("{1}\n{2}\n{3}\n", 8), "{1}\n{2}\n");
  EXPECT_EQ(cut("{1}\n{2}\n{3}\n", 12), "{1}\n{2}\n{3}\n");
  EXPECT_EQ(cut("{1}\n{2}\n{3}\n", 0), "");
  EXPECT_EQ(cut("{1}\n{2", 100),
            "{1}\n");  // the machine lost power: less is there than was counted
  EXPECT_EQ(cut("{1", 100), "");
  // Pieces, of which the last ones hold no line end, and a file that no memory would hold.
  const std::string line(2 << 20, 'x');
  EXPECT_EQ(cut("{1}\n" + line + "\n" + line, 5 << 20), "{1}\n" + line + "\n");
  write_bytes(run.paths().metrics(), "{1}\n{2}\n");
  fs::resize_file(run.paths().metrics(), std::uintmax_t{5} << 30);
  run.cut_metrics(8);
  EXPECT_EQ(read_bytes(run.paths().metrics()), "{1}\n{2}\n");
}

TEST(RunFolder, RanksThatSeeAnotherFolderAreNamed) {
  const TestFolder test;
  const fs::path& folder = test.path();
  const RunFolder run(folder / "shared", 1, false);
  RunFolder other(folder / "local", 2, false);
  const auto check = [&](ProcessGroup& world, const fs::path& path) {
    check_shared_folder(world, "node" + std::to_string(world.rank()), RunPaths{path}, run.id(),
                        std::chrono::milliseconds(100));
  };
  run_ranks(3, [&](ProcessGroup& world) { check(world, folder / "shared"); });
  run_ranks(3, [&](ProcessGroup& world) {
    for (const char* name : {"local", "none"}) {
      const fs::path path = folder / (world.rank() == 2 ? name : "shared");
      EXPECT_THAT(error_of(ExitCode::kStorage, [&] { check(world, path); }),
                  AllOf(HasSubstr("rank 2 on node2 does not see"), HasSubstr("run.json"),
                        HasSubstr("all hosts share")));
    }
  });
}

// As on a network file system.
TEST(RunFolder, AFolderThatIsSeenLateIsShared) {
  const TestFolder test;
  const fs::path& folder = test.path();
  const RunFolder run(folder / "early", 1, false);
  run_ranks(2, [&](ProcessGroup& world) {
    std::thread late([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      if (world.rank() == 0) fs::copy(folder / "early", folder / "late");
    });
    check_shared_folder(world, "node", RunPaths{folder / "late"}, run.id());
    late.join();
  });
}

}  // namespace
}  // namespace birkhoff
