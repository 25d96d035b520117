// Leases on folders: who holds one, when it may be taken, and how its old holder learns of that.
#include "cluster/base/files/lease.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <fstream>
#include <map>
#include <optional>
#include <string>

#include "cluster/base/files/file.h"
#include "tests/cluster/base/tally.h"
#include "tests/cluster/base/temporary_folder.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;
using std::chrono::steady_clock;
using testing::AllOf;
using testing::HasSubstr;

constexpr LeaseTimes kFast{.renew = milliseconds(40), .expires = milliseconds(400)};

struct Folder {
  fs::path path() const { return temporary.path(); }
  TemporaryFolder temporary;
};

// Writes the record of a holder on another machine.
void write_holder(const fs::path& folder, int number, bool held = true) {
  std::ofstream(folder / ("holder-" + std::to_string(number)))
      << R"({"holder":"process 7 on elsewhere","host":"elsewhere","space":"elsewhere pid:[1]",)"
      << R"("process":7,"start":"1","held":)" << (held ? "true" : "false") << "}\n";
}

void touch(const fs::path& file) { ::utimensat(AT_FDCWD, file.c_str(), nullptr, 0); }

double seconds_to_take(const fs::path& folder, std::int64_t number) {
  const auto start = steady_clock::now();
  const Lease lease(folder, "the folder", kFast);
  EXPECT_EQ(lease.number(), number);
  return std::chrono::duration<double>(steady_clock::now() - start).count();
}

TEST(Lease, NumbersGrowFromHolderToHolder) {
  const Folder folder;
  for (int number = 1; number < 5; ++number) {
    EXPECT_LT(seconds_to_take(folder.path(), number), 0.3) << "the last one gave it back";
    EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), {}), 1) << "one file is left";
  }
}

// Another process may be about to try the same number.
TEST(Lease, OnlyFilesOfEarlierHoldersAreRemoved) {
  const Folder folder;
  const fs::path half = folder.path() / "holder-1.tmp-77";
  std::ofstream(half) << "half";
  { const Lease lease(folder.path(), "the folder", kFast); }
  EXPECT_TRUE(fs::exists(half));
  { const Lease lease(folder.path(), "the folder", kFast); }
  EXPECT_FALSE(fs::exists(half));
}

TEST(Lease, AFileSystemWithoutHardLinksIsNamed) {
  const Folder folder;
  set_file_fault_hook([](const char* call, const std::string&, std::int64_t) {
    return std::string_view(call) == "link" ? EPERM : 0;
  });
  try {
    const Lease lease(folder.path(), "the folder", kFast);
    ADD_FAILURE() << "a lease without a link";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kStorage);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("no hard links"), HasSubstr("choose a --run")));
  }
  set_file_fault_hook({});
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST(Lease, IsTakenFromAnotherMachineOnceItExpires) {
  const Folder folder;
  write_holder(folder.path(), 3, /*held=*/false);
  EXPECT_LT(seconds_to_take(folder.path(), 4), 0.3);
  write_holder(folder.path(), 7);
  EXPECT_GE(seconds_to_take(folder.path(), 8), 0.4);
  write_holder(folder.path(), 9);
  std::ofstream(folder.path() / "holder-10") << "not a record";  // of a later version
  EXPECT_GE(seconds_to_take(folder.path(), 11), 0.4);
}

TEST(Lease, IsRefusedWhileItIsRenewed) {
  const Folder folder;
  write_holder(folder.path(), 3);
  std::thread holder([&] {
    for (int i = 0; i < 10; ++i) {
      std::this_thread::sleep_for(milliseconds(20));
      touch(folder.path() / "holder-3");
    }
  });
  try {
    const Lease lease(folder.path(), "the folder", kFast);
    FAIL() << "the holder lives";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kUsage);
    EXPECT_THAT(error.what(), AllOf(HasSubstr("the folder is in use by process 7 on elsewhere"),
                                    HasSubstr("holder-3")));
  }
  holder.join();
}

TEST(Lease, ALookTellsTheHolder) {
  const Folder folder;
  EXPECT_EQ(Lease::holder(folder.path() / "nothing", kFast), std::nullopt);
  EXPECT_EQ(Lease::holder(folder.path(), kFast), std::nullopt);
  write_holder(folder.path(), 1, /*held=*/false);
  EXPECT_EQ(Lease::holder(folder.path()), std::nullopt) << "it gave the folder back";
  write_holder(folder.path(), 2);
  EXPECT_EQ(Lease::holder(folder.path()), "process 7 on elsewhere");
  std::this_thread::sleep_for(kFast.expires);
  EXPECT_EQ(Lease::holder(folder.path(), {.expires = milliseconds(100)}), std::nullopt);
  const pid_t child = ::fork();
  if (child == 0) {
    new Lease(folder.path(), "the folder", kFast);
    ::_exit(0);
  }
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_EQ(Lease::newest_number(folder.path()), 3);
  EXPECT_EQ(Lease::holder(folder.path()), std::nullopt) << "its process has ended";
}

TEST(Lease, ALockThatOutlivesItsMachineIsKnown) {
  const Folder folder;
  EXPECT_FALSE(Lease::outlived_by_lock(folder.path(), kFast)) << "nobody has a lease";
  write_holder(folder.path(), 1);
  EXPECT_TRUE(Lease::outlived_by_lock(folder.path(), kFast));
  const Lease lease(folder.path(), "the folder", kFast);
  EXPECT_FALSE(Lease::outlived_by_lock(folder.path(), kFast)) << "this machine is not gone";
}

TEST(Lease, TheHolderLearnsThatItLostTheFolder) {
  const Folder folder;
  const Lease lease(folder.path(), "the folder", kFast);
  lease.check();
  write_holder(folder.path(), 2);
  EXPECT_THROW(lease.check(), FolderLost);
  std::this_thread::sleep_for(2 * kFast.expires);
  EXPECT_THROW(lease.require_held(), FolderLost) << "it is not renewed any more";
  // The next holder but one has removed both files.
  fs::remove(folder.path() / "holder-1");
  write_holder(folder.path(), 3);
  fs::remove(folder.path() / "holder-2");
  try {
    lease.check();
    FAIL();
  } catch (const FolderLost& lost) {
    EXPECT_THAT(lost.what(), HasSubstr("was taken by process 7 on elsewhere"));
  }
}

TEST(Lease, OneOfManyProcessesGetsIt) {
  const Folder folder;
  write_holder(folder.path(), 1);  // it expires for all of them at the same time
  constexpr int kProcesses = 8;
  for (int i = 0; i < kProcesses; ++i) {
    if (fork() != 0) continue;
    int code = 0;
    try {
      const Lease lease(folder.path(), "the folder", kFast);
      std::this_thread::sleep_for(milliseconds(1500));
      lease.check();
    } catch (const Error& error) {
      code = static_cast<int>(error.code());
    }
    _exit(code);
  }
  std::map<int, int> count_of_code;
  for (int i = 0; i < kProcesses; ++i) {
    int status = 0;
    wait(&status);
    ++count_of_code[WEXITSTATUS(status)];
  }
  EXPECT_EQ(count_of_code, (std::map<int, int>{{0, 1}, {2, kProcesses - 1}}));
}

// A holder is stopped for longer than its lease, and continues after another process has the
// folder: it never passes check() again. BIRKHOFF_TAKEOVERS sets the number of trials.
TEST(Lease, AStoppedHolderDoesNotPassAfterATakeover) {
  const char* count = std::getenv("BIRKHOFF_TAKEOVERS");
  const int trials = count == nullptr ? 2 : std::atoi(count);
  Tally tally("leases taken from stopped holders");
  for (int trial = 0; trial < trials; ++trial) {
    tally.attempt([&] {
      const Folder folder;
      const fs::path passes = folder.path() / "passes";
      const pid_t holder = fork();
      if (holder == 0) {
        const Lease lease(folder.path(), "the folder", kFast);
        const int log = ::open(passes.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0666);
        try {
          for (;;) {
            lease.check();
            if (::write(log, ".", 1) != 1) _exit(2);
          }
        } catch (const FolderLost&) {
          _exit(0);
        }
      }
      while (!fs::exists(passes)) std::this_thread::sleep_for(milliseconds(1));
      std::this_thread::sleep_for(std::chrono::microseconds(997 * (trial % 50)));
      kill(holder, SIGSTOP);
      int stopped = 0;
      waitpid(holder, &stopped, WUNTRACED);  // until then it may renew its lease
      const Lease taken(folder.path(), "the folder", kFast);
      const auto before = fs::file_size(passes);
      kill(holder, SIGCONT);
      int status = 0;
      waitpid(holder, &status, 0);
      EXPECT_EQ(status, 0);
      // It may have been stopped between check() and what it did then: one pass.
      EXPECT_LE(fs::file_size(passes) - before, 1u);
    });
  }
}

}  // namespace
}  // namespace birkhoff
