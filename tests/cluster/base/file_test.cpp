#include "cluster/base/files/file.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <set>
#include <thread>

#include "tests/cluster/base/temporary_folder.h"

namespace birkhoff {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

class FileTest : public testing::Test {
 protected:
  ~FileTest() override { set_file_fault_hook({}); }
  std::string path(const std::string& name) const { return folder_.path(name); }
  const TemporaryFolder folder_;
};

ExitCode code_of(const std::function<void()>& action, std::string* what = nullptr) {
  try {
    action();
  } catch (const Error& error) {
    if (what != nullptr) *what = error.what();
    return error.code();
  }
  return ExitCode::kOk;
}

TEST_F(FileTest, RequireNamesThePlace) {
  std::string what;
  EXPECT_EQ(code_of([] { require(false, "one is two"); }, &what), ExitCode::kInternal);
  EXPECT_THAT(what, HasSubstr("file_test.cpp:"));
  EXPECT_THAT(what, HasSubstr("one is two"));
}

TEST_F(FileTest, WritesAndReads) {
  File file = File::create(path("a"));
  file.write_all("hello ");
  file.write_all("world");
  file.sync();
  EXPECT_EQ(file.size(), 11);
  file.close();
  char part[5];
  const File reader = File::open_for_read(path("a"));
  reader.pread_exact(part, 5, 6);
  EXPECT_EQ(std::string(part, 5), "world");
  EXPECT_EQ(code_of([&] { reader.pread_exact(part, 5, 7); }), ExitCode::kStorage);
  EXPECT_EQ(code_of([&] { (void)File::create(path("a")); }), ExitCode::kStorage);
  File more = File::open_for_append(path("a"));
  more.write_all("!");
  more.close();
  EXPECT_EQ(read_file(path("a"), 12), "hello world!");
  EXPECT_EQ(code_of([&] { read_file(path("a"), 11, ExitCode::kData); }), ExitCode::kData);
  EXPECT_EQ(file_size(path("a")), 12);
}

TEST_F(FileTest, ErrorsNameCallPathReasonAndCure) {
  std::string what;
  EXPECT_EQ(code_of([&] { read_file(path("none"), 10, ExitCode::kConfig); }, &what),
            ExitCode::kConfig);
  EXPECT_THAT(what, HasSubstr("open of '" + path("none") + "' failed: No such file or directory"));
  EXPECT_THAT(what, HasSubstr("check the path"));
  set_file_fault_hook([](const char* call, const std::string&, std::int64_t) {
    return std::strcmp(call, "write") == 0 ? ENOSPC : 0;
  });
  EXPECT_EQ(code_of([&] { write_file_durably(path("a"), "12345"); }, &what), ExitCode::kStorage);
  EXPECT_THAT(what, HasSubstr("No space left on device with 5 bytes to go; free space"));
}

TEST_F(FileTest, NamesAndTrees) {
  make_directory(path("x/y/z"));
  make_directory(path("x/y/z"));
  write_file_durably(path("x/b"), "1");
  write_file_durably(path("x/a"), "2");
  EXPECT_EQ(::symlink("/", path("x/link").c_str()), 0);
  EXPECT_THAT(list_directory(path("x")), ElementsAre("a", "b", "link", "y"));
  EXPECT_TRUE(is_directory(path("x/y")));
  EXPECT_FALSE(is_directory(path("x/a")));
  EXPECT_FALSE(path_exists(path("x/a/b")));
  rename_path(path("x/a"), path("x/y/a"));
  EXPECT_EQ(read_file(path("x/y/a"), 10), "2");
  EXPECT_EQ(code_of([&] { make_directory(path("x/b")); }), ExitCode::kStorage);
  EXPECT_EQ(code_of([&] { make_directory(path("x/b/c")); }), ExitCode::kStorage);
  remove_tree(path("x"));  // but not the target of the link
  EXPECT_FALSE(path_exists(path("x")));
  remove_tree(path("x"));
  EXPECT_EQ(parent_path("a/b/"), "a");
  EXPECT_EQ(parent_path("a"), ".");
  EXPECT_EQ(parent_path("/a"), "/");
}

// Every operation that writes, and what must hold after it has failed or succeeded.
TEST_F(FileTest, EveryCallCanFailAndNothingIsLost) {
  const std::string big(100000, 'n');
  write_file_durably(path("state"), "old");
  const auto save = [&] {
    make_directory(path("dir"));
    write_file_durably(path("dir/part"), big);
    File more = File::open_for_append(path("dir/part"));
    more.write_all(big);
    more.sync();
    more.close();
    for (const std::string& name : list_directory(path("dir")))
      (void)file_size(path("dir/" + name));
    (void)read_file(path("dir/part"), 1 << 20);
    const FileLock lock(path("lock"), "the folder");
    write_file_durably(path("state"), "new");
    remove_tree(path("dir"));
  };
  for (const int error : {EIO, ENOSPC, EACCES}) {
    std::set<std::string> failed_calls;
    bool succeeded = false;
    for (std::int64_t n = 0; !succeeded; ++n) {
      ASSERT_LT(n, 500);
      std::string failed_call;
      set_file_fault_hook([&](const char* call, const std::string&, std::int64_t nth) {
        if (nth == n) failed_call = call;
        return nth == n ? error : 0;
      });
      std::string what;
      const ExitCode code = code_of(save, &what);
      set_file_fault_hook({});
      if (failed_call.empty()) {
        EXPECT_EQ(code, ExitCode::kOk) << what;
        succeeded = true;
      } else {
        EXPECT_EQ(code, ExitCode::kStorage) << failed_call;
        EXPECT_THAT(what, HasSubstr(failed_call));
        EXPECT_THAT(what, HasSubstr(std::strerror(error)));
        failed_calls.insert(failed_call);
      }
      const std::string state = read_file(path("state"), 10);
      EXPECT_TRUE(state == "old" || state == "new") << state;
      for (const std::string& name : list_directory(folder_.path())) {
        EXPECT_EQ(name.find(".tmp-"), std::string::npos) << name;
      }
      remove_tree(path("dir"));
    }
    EXPECT_EQ(failed_calls,
              (std::set<std::string>{"open", "write", "read", "fsync", "fstat", "close", "stat",
                                     "mkdir", "rename", "opendir", "readdir", "flock", "ftruncate",
                                     "pwrite", "unlink", "rmdir"}));
  }
}

TEST_F(FileTest, InterruptedCallsAreRepeatedAndShortOnesContinued) {
  std::set<std::string> calls;
  set_file_fault_hook([&](const char* call, const std::string&, std::int64_t nth) {
    // Neither may ever be repeated.
    if (std::strcmp(call, "fsync") == 0 || std::strcmp(call, "close") == 0) return 0;
    calls.insert(call);
    return nth % 2 == 0 ? EINTR : kShortTransfer;
  });
  make_directory(path("d"));
  write_file_durably(path("d/a"), "0123456789");
  EXPECT_EQ(read_file(path("d/a"), 100), "0123456789");
  char part[4];
  File::open_for_read(path("d/a")).pread_exact(part, 4, 3);
  EXPECT_EQ(std::string(part, 4), "3456");
  remove_tree(path("d"));
  EXPECT_FALSE(path_exists(path("d")));
  EXPECT_GE(calls.size(), 10u);
}

TEST_F(FileTest, AFailedFsyncIsFinal) {
  int num_syncs = 0;
  set_file_fault_hook([&](const char* call, const std::string&, std::int64_t) {
    if (std::strcmp(call, "fsync") != 0) return 0;
    ++num_syncs;
    return EINTR;
  });
  EXPECT_EQ(code_of([&] { write_file_durably(path("a"), "x"); }), ExitCode::kStorage);
  EXPECT_EQ(num_syncs, 1);
  EXPECT_FALSE(path_exists(path("a")));
}

TEST_F(FileTest, DescriptorsAreClosedWhateverFails) {
  const auto num_open = [] { return list_directory("/proc/self/fd").size(); };
  const std::size_t before = num_open();
  for (std::int64_t n = 0; n < 12; ++n) {
    set_file_fault_hook(
        [n](const char*, const std::string&, std::int64_t nth) { return nth == n ? EIO : 0; });
    (void)code_of([&] { write_file_durably(path("a"), "x"); });
  }
  set_file_fault_hook({});
  EXPECT_EQ(num_open(), before);
}

TEST_F(FileTest, WhoHoldsALockIsSeenWithoutTakingIt) {
  EXPECT_EQ(lock_holder(path("lock")), std::nullopt) << "no file";
  {
    const FileLock lock(path("lock"), "the folder");
    EXPECT_THAT(lock_holder(path("lock")).value_or(""),
                testing::StartsWith(fmt::format("process {} on ", ::getpid())));
  }
  EXPECT_EQ(lock_holder(path("lock")), std::nullopt);
  // A process that looks at this moment keeps no other process from its lock.
  const int looking = ::open(path("lock").c_str(), O_RDONLY);
  ASSERT_EQ(::flock(looking, LOCK_SH | LOCK_NB), 0);
  std::thread looker([looking] {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    ::close(looking);
  });
  EXPECT_EQ(code_of([&] { FileLock(path("lock"), "the folder"); }), ExitCode::kOk);
  looker.join();
}

TEST_F(FileTest, WhereThereAreNoLocksNothingIsLocked) {
  for (const int error : {ENOSYS, ENOLCK, EOPNOTSUPP}) {
    set_file_fault_hook([error](const char* call, const std::string&, std::int64_t) {
      return std::strcmp(call, "flock") == 0 ? error : 0;
    });
    EXPECT_FALSE(FileLock(path("lock"), "the folder").is_held());
    EXPECT_EQ(lock_holder(path("lock")), std::nullopt);
    set_file_fault_hook({});
    EXPECT_TRUE(FileLock(path("lock"), "the folder").is_held());
  }
}

TEST_F(FileTest, TemporaryNamesAreNoOtherProcesss) {
  const std::string name = temporary_name("a/b");
  EXPECT_THAT(name, testing::StartsWith(fmt::format("a/b.tmp-{}-{}-", host_name(), ::getpid())));
  EXPECT_NE(temporary_name("a/b"), name);
}

TEST_F(FileTest, AFileSystemThatCannotSyncFoldersIsNamed) {
  set_file_fault_hook([](const char* call, const std::string&, std::int64_t) {
    return std::strcmp(call, "fsync") == 0 ? EINVAL : 0;
  });
  std::string what;
  EXPECT_EQ(code_of([&] { sync_directory(folder_.path()); }, &what), ExitCode::kStorage);
  EXPECT_THAT(what, AllOf(HasSubstr("fsync of '"), HasSubstr("cannot make names durable"),
                          HasSubstr("on another file system")));
  set_file_fault_hook({});
}

TEST_F(FileTest, FreeBytesAreTheSystemsOrTheHooks) {
  EXPECT_GT(free_bytes(path(".")), 0);
  EXPECT_LT(free_bytes(path(".")), std::int64_t{1} << 60);
  std::string what;
  EXPECT_EQ(code_of([&] { free_bytes(path("missing")); }, &what), ExitCode::kStorage);
  EXPECT_THAT(what, AllOf(HasSubstr("statvfs"), HasSubstr(path("missing"))));
  EXPECT_GT(free_bytes("/proc"), std::int64_t{1} << 60) << "no size: no limit";
  set_free_bytes_hook([](const std::string& of) { return static_cast<std::int64_t>(of.size()); });
  EXPECT_EQ(free_bytes("four"), 4);
  set_free_bytes_hook({});
  EXPECT_GT(free_bytes(path(".")), 4);
}

TEST_F(FileTest, LockNamesItsHolderAndEndsWithIt) {
  std::string what;
  {
    const FileLock lock(path("lock"), "the run folder");
    EXPECT_EQ(code_of([&] { FileLock(path("lock"), "the run folder"); }, &what), ExitCode::kUsage);
    EXPECT_THAT(what,
                HasSubstr(fmt::format("the run folder is in use by process {} on", ::getpid())));
  }
  // A process that is killed leaves the file but no lock.
  const pid_t child = ::fork();
  if (child == 0) {
    const FileLock lock(path("lock"), "x");
    ::_exit(0);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(code_of([&] { FileLock(path("lock"), "the run folder"); }), ExitCode::kOk);
}

}  // namespace
}  // namespace birkhoff
