#include "launcher/processes/shared_memory_folder.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace birkhoff {
namespace {

namespace fs = std::filesystem;

class SharedMemoryFolderTest : public testing::Test {
 protected:
  void SetUp() override { ASSERT_NE(mkdtemp(parent_.data()), nullptr); }
  void TearDown() override { fs::remove_all(parent_); }
  // Makes a folder such as a killed run leaves; `name` is relative to the parent.
  void leave(const std::string& name) const {
    fs::create_directory(parent_ + "/" + name);
    std::ofstream(parent_ + "/" + name + "/vader_segment") << "memory";
  }
  bool is_there(const std::string& name) const { return fs::exists(parent_ + "/" + name); }

  std::string parent_ = (fs::temp_directory_path() / "birkhoff_shm_XXXXXX").string();
  const std::string mine_ = "birkhoff-" + std::to_string(geteuid()) + "-";
};

TEST_F(SharedMemoryFolderTest, LivesAsLongAsTheRun) {
  std::string path;
  {
    const SharedMemoryFolder folder(parent_);
    path = folder.path();
    EXPECT_EQ(path.rfind(parent_ + "/" + mine_, 0), 0u) << path;
    struct stat status;
    ASSERT_EQ(stat(path.c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 0777, 0700u) << "nobody else's";
    std::ofstream(path + "/vader_segment") << "memory";
  }
  EXPECT_FALSE(fs::exists(path));
}

TEST_F(SharedMemoryFolderTest, RemovesAbandonedFoldersOfItsKindAlone) {
  leave(mine_ + "abcdef");
  leave("vader_segment.host.0.1.0");
  leave("birkhoff-" + std::to_string(geteuid()) + "0-abcdef");  // the number of another user
  fs::create_directory_symlink(parent_ + "/vader_segment.host.0.1.0",
                               parent_ + "/" + mine_ + "link");
  const SharedMemoryFolder folder(parent_);
  EXPECT_FALSE(is_there(mine_ + "abcdef"));
  EXPECT_TRUE(is_there("vader_segment.host.0.1.0/vader_segment"));
  EXPECT_TRUE(is_there("birkhoff-" + std::to_string(geteuid()) + "0-abcdef"));
}

TEST_F(SharedMemoryFolderTest, KeepsWhatARunHolds) {
  const SharedMemoryFolder first(parent_), second(parent_);
  EXPECT_NE(first.path(), second.path());
  EXPECT_TRUE(fs::exists(first.path()));
}

// The supervisor is killed, so no destructor runs; the processes that it started still run.
TEST_F(SharedMemoryFolderTest, KeepsWhatTheProcessesOfARunHold) {
  int from_run[2], to_run[2];
  ASSERT_EQ(pipe(from_run), 0);
  ASSERT_EQ(pipe(to_run), 0);
  const pid_t supervisor = fork();
  if (supervisor == 0) {
    const std::string path = (new SharedMemoryFolder(parent_))->path();
    if (write(from_run[1], path.data(), path.size()) < 0) _exit(1);
    if (fork() == 0) {
      char byte;
      close(to_run[1]);
      [[maybe_unused]] const ssize_t end = read(to_run[0], &byte, 1);
    }
    _exit(0);
  }
  close(from_run[1]);
  ASSERT_EQ(waitpid(supervisor, nullptr, 0), supervisor);
  char buffer[4096];
  const std::string path(buffer,
                         static_cast<std::size_t>(read(from_run[0], buffer, sizeof buffer)));
  {
    const SharedMemoryFolder next(parent_);
    EXPECT_TRUE(fs::exists(path)) << path;
  }
  close(to_run[1]);
  EXPECT_EQ(read(from_run[0], buffer, sizeof buffer), 0) << "all processes have ended";
  const SharedMemoryFolder next(parent_);
  EXPECT_FALSE(fs::exists(path)) << path;
  close(from_run[0]);
  close(to_run[0]);
}

TEST_F(SharedMemoryFolderTest, IsDoneWithoutWhereNoneCanBeMade) {
  EXPECT_EQ(SharedMemoryFolder(parent_ + "/nowhere").path(), "");
}

}  // namespace
}  // namespace birkhoff
