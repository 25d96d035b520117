// Tests the harness itself: it finds the losses of programs that do not sync enough, and none in a
// program that does.
#include "tests/crash/crash_states.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <set>
#include <stdexcept>
#include <thread>

#include "cluster/base/files/file.h"
#include "tests/runtime/checkpoint/checkpoint_fixture.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using testing::Contains;
using testing::Not;

constexpr std::size_t kAll = SIZE_MAX;

// Runs programs in a folder with "old" in file a. Crash states are texts: "a=old b=new d/".
class CrashStatesTest : public testing::Test {
 protected:
  CrashStatesTest() { write_bytes(folder_.path() / "a", "old"); }

  std::string path(const std::string& name) const { return (folder_.path() / name).string(); }
  File create(const std::string& name, const std::string& bytes) const {
    File file = File::create(path(name));
    file.write_all(bytes);
    return file;
  }
  // A rename without a sync.
  void rename_only(const std::string& from, const std::string& to) const {
    ASSERT_EQ(::rename(path(from).c_str(), path(to).c_str()), 0);
  }
  void sync_names() const { sync_directory(folder_.path().string()); }

  static std::string text_of(const FileTree& tree) {
    std::string text;
    for (const auto& [name, content] : tree) {
      text += (text.empty() ? "" : " ") + name + (content == nullptr ? "/" : "=" + *content);
    }
    return text;
  }
  std::set<std::string> states(const std::function<void()>& program, std::int64_t mark = 0) {
    std::set<std::string> texts;
    for (const CrashState& state : crash_states(record_io(folder_, program), kAll)) {
      if (state.mark == mark) texts.insert(text_of(state.tree));
    }
    return texts;
  }

  const TestFolder folder_;
};

// The order of calls in the product: write_file_durably().
TEST_F(CrashStatesTest, ADurableReplacementHoldsOldOrNewAndKeepsItsPromise) {
  const auto replace = [&] {
    File file = create("b", "new");
    file.sync();
    file.close();
    rename_path(path("b"), path("a"));
    mark_io(1);
  };
  const IoTrace trace = record_io(folder_, replace);
  for (const CrashState& state : crash_states(trace, kAll)) {
    const std::string content = *state.tree.at("a");
    EXPECT_TRUE(content == "new" || (state.mark == 0 && content == "old")) << state.lost;
  }
}

TEST_F(CrashStatesTest, ARenameMayOvertakeBytesThatWereNotSynced) {
  const auto found = states(
      [&] {
        create("b", "new").close();
        rename_only("b", "a");
        sync_names();
        mark_io(1);
      },
      1);
  EXPECT_THAT(found, testing::IsSupersetOf({"a=new", "a="}));
  EXPECT_THAT(found, Not(Contains("a=old")));
}

TEST_F(CrashStatesTest, ARenameMayBeLostThatWasNotSynced) {
  const auto found = states(
      [&] {
        File file = create("b", "new");
        file.sync();
        sync_names();
        rename_only("b", "a");
        mark_io(1);
      },
      1);
  EXPECT_THAT(found, testing::UnorderedElementsAre("a=new", "a=old b=new"));  // never half of it
}

TEST_F(CrashStatesTest, SyncOfAFileKeepsItsBytesButNotItsName) {
  const auto found = states(
      [&] {
        create("b", "new").sync();
        mark_io(1);
      },
      1);
  EXPECT_THAT(found, testing::UnorderedElementsAre("a=old", "a=old b=new"));
}

TEST_F(CrashStatesTest, SyncOfAFolderKeepsNamesButNotBytes) {
  const auto found = states(
      [&] {
        create("b", "new");
        sync_names();
        mark_io(1);
      },
      1);
  EXPECT_THAT(found, testing::IsSupersetOf({"a=old b=", "a=old b=new"}));
  EXPECT_THAT(found, Not(Contains("a=old")));
}

TEST_F(CrashStatesTest, WithAFolderAllIsLostThatItHolds) {
  const auto found = states(
      [&] {
        ASSERT_EQ(::mkdir(path("d").c_str(), 0777), 0);
        create("d/b", "new").sync();
        sync_directory(path("d"));
        mark_io(1);
      },
      1);
  EXPECT_THAT(found, testing::UnorderedElementsAre("a=old", "a=old d/ d/b=new"));
}

TEST_F(CrashStatesTest, OperationsOnDifferentNamesAreReordered) {
  const auto found = states(
      [&] {
        create("b", "1").sync();
        create("c", "2").sync();
        remove_file(path("a"));
        mark_io(1);
      },
      1);
  EXPECT_THAT(found, testing::IsSupersetOf({"c=2", "a=old c=2", "b=1", "", "a=old"}));
}

TEST_F(CrashStatesTest, OperationsOnOneNameKeepTheirOrder) {
  const auto found = states(
      [&] {
        remove_file(path("a"));
        create("a", "1").sync();
        rename_only("a", "b");
        create("a", "2").sync();
        mark_io(1);
      },
      1);
  EXPECT_THAT(found, testing::UnorderedElementsAre("a=old", "", "a=1", "b=1", "a=2 b=1"));
}

TEST_F(CrashStatesTest, WritesAreLostReorderedAndTorn) {
  const std::string first(700, '1'), second(900, '2');
  std::set<std::string> found;
  for (const CrashState& state : crash_states(record_io(folder_,
                                                        [&] {
                                                          File file = create("b", first);
                                                          sync_names();
                                                          file.write_all(second);
                                                          mark_io(1);
                                                        }),
                                              kAll)) {
    if (state.mark == 1) found.insert(*state.tree.at("b"));
  }
  const std::string whole = first + second;
  EXPECT_THAT(found, testing::IsSupersetOf({std::string(), whole}));
  found.clear();
  for (const CrashState& state : crash_states(record_io(folder_,
                                                        [&] {
                                                          File file = create("c", first);
                                                          sync_names();
                                                          file.write_all(second);
                                                        }),
                                              kAll)) {
    if (state.tree.contains("c")) found.insert(*state.tree.at("c"));
  }
  const auto with_hole = [&](std::size_t from, std::size_t to) {
    std::string text = whole;
    return text.replace(from, to - from, to - from, '\0');
  };
  EXPECT_THAT(found, testing::IsSupersetOf({std::string(), first, whole}));
  EXPECT_THAT(found, Contains(with_hole(0, 700))) << "the second write without the first";
  EXPECT_THAT(found, Contains(whole.substr(0, 1024))) << "torn at a sector";
  EXPECT_THAT(found, Contains(with_hole(1024, 1536))) << "one sector is missing";
  EXPECT_THAT(found, Contains(with_hole(700, 1600))) << "the size without the bytes";
  EXPECT_THAT(found, Not(Contains(whole.substr(0, 1000))));
  for (const std::string& content : found) {
    for (std::size_t i = 0; i < content.size(); ++i) {
      ASSERT_TRUE(content[i] == whole[i] || content[i] == '\0');
    }
  }
}

TEST_F(CrashStatesTest, OverwrittenBytesAreOldOrNew) {
  const auto found = states([&] {
    const int fd = ::open(path("a").c_str(), O_RDWR);
    ASSERT_EQ(::pwrite(fd, "N", 1, 0), 1);
    ASSERT_EQ(::ftruncate(fd, 2), 0);
    ::close(fd);
  });
  EXPECT_THAT(found, testing::UnorderedElementsAre("a=old", "a=Nld", "a=ol", "a=Nl"));
}

TEST_F(CrashStatesTest, AKilledProgramsBytesMayBeLostAfterANewStart) {
  const IoTrace killed = record_io(folder_, [&] {
    create("b", "new");
    sync_names();
  });
  const TestFolder later;
  const IoTrace both = record_after_kill(killed, killed.events.size(), later, [&] {
    EXPECT_EQ(read_bytes(later.path() / "b"), "new");  // the system keeps running
    File file = File::create((later.path() / "c").string());
    sync_directory(later.path().string());
    mark_io(1);
  });
  std::set<std::string> found;
  for (const CrashState& state : crash_states(both, kAll)) {
    if (state.mark == 1) found.insert(text_of(state.tree));
  }
  EXPECT_THAT(found, testing::IsSupersetOf({"a=old b= c=", "a=old b=new c="}));
}

TEST_F(CrashStatesTest, CallsThatAreNotSeenAreNoticed) {
  EXPECT_THROW(states([&] { std::ofstream(path("b")) << "unseen"; }), std::logic_error);
  EXPECT_THROW(states([&] { EXPECT_EQ(::symlink("a", path("c").c_str()), 0); }), std::logic_error);
}

TEST_F(CrashStatesTest, ThreadsAreRecorded) {
  const IoTrace trace = record_io(folder_, [&] {
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([this, i] {
        for (int k = 0; k < 50; ++k) {
          write_file_durably(path("t" + std::to_string(i)), std::to_string(k));
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  });
  EXPECT_GE(trace.events.size(), 4u * 50u * 5u);
  EXPECT_FALSE(crash_states(trace, 10).empty());
}

TEST_F(CrashStatesTest, ASampleIsSpreadOverTheCutsAndTheSameAgain) {
  const IoTrace trace = record_io(folder_, [&] {
    for (const char* name : {"b", "c", "d", "e"}) {
      create(name, std::string(2000, 'x')).sync();
    }
  });
  const auto all = crash_states(trace, kAll);
  std::set<std::size_t> cuts;
  std::set<std::string> texts;
  for (const CrashState& state : all) {
    cuts.insert(state.cut);
    texts.insert(text_of(state.tree));
  }
  EXPECT_EQ(texts.size(), all.size());  // no mark: equal trees are one state
  ASSERT_GT(all.size(), 2 * cuts.size());
  const auto some = crash_states(trace, cuts.size()), again = crash_states(trace, cuts.size());
  std::set<std::size_t> sampled_cuts;
  for (std::size_t i = 0; i < some.size(); ++i) {
    sampled_cuts.insert(some[i].cut);
    EXPECT_EQ(text_of(some[i].tree), text_of(again[i].tree));
  }
  EXPECT_EQ(sampled_cuts, cuts);
}

}  // namespace
}  // namespace birkhoff
