#include "data/corpus/staged_shards.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <thread>

#include "cluster/base/error.h"
#include "data/corpus/corpus.h"
#include "data/loader/token_windows.h"
#include "tests/data/helpers.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

class StagedShardsTest : public testing::Test {
 protected:
  StagedShardsTest() {
    std::string text;
    for (int i = 0; i < 40'000; ++i) text += static_cast<char>('a' + i * i % 26);
    write_text(folder_ / "text", text);
    PrepareOptions options = prepare_options(folder_ / "corpus", {folder_ / "text"});
    options.valid_fraction = 0;
    options.shard_tokens = 5000;
    prepare_corpus(options);
  }

  Corpus corpus() const { return Corpus(folder_ / "corpus"); }
  static std::int64_t num_shards(const Corpus& corpus) {
    return corpus.stream("train", "tokens").shard_size();
  }
  fs::path copies(const Corpus& corpus) const {
    return fs::path(folder_ / "stage") / corpus.manifest().fingerprint();
  }
  // Waits at most ten seconds.
  static bool has_copies(const Corpus& corpus, std::int64_t count) {
    for (int i = 0; i < 1000 && corpus.staged()->num_usable() < count; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return corpus.staged()->num_usable() == count;
  }
  // All tokens of the training windows.
  static std::vector<std::int64_t> tokens(const Corpus& corpus) {
    const auto source = training_windows(corpus, {.sequence_length = 100});
    const Batch batch = read_samples(*source, 0, source->num_samples());
    const at::Tensor inputs = batch.at(field::kInputs).contiguous();
    const auto* begin = inputs.const_data_ptr<std::int64_t>();
    return {begin, begin + inputs.numel()};
  }

  TemporaryFolder folder_;
};

TEST_F(StagedShardsTest, ReadersUseCopiesOnceTheyAreComplete) {
  const std::vector<std::int64_t> expected = tokens(corpus());
  Corpus staged = corpus();
  staged.stage({.folder = folder_ / "stage"});
  const auto source = training_windows(staged, {.sequence_length = 100});
  read_samples(*source, 0, source->num_samples());  // opens shards of the corpus
  ASSERT_TRUE(has_copies(staged, num_shards(staged)));
  fs::rename(folder_ / "corpus", folder_ / "gone");
  EXPECT_EQ(tokens(staged), expected);
  EXPECT_NO_THROW(read_samples(*source, 0, source->num_samples()));
}

TEST_F(StagedShardsTest, AnotherProcessUsesTheCopies) {
  Corpus first = corpus();
  first.stage({.folder = folder_ / "stage"});
  ASSERT_TRUE(has_copies(first, num_shards(first)));
  Corpus second = corpus();
  second.stage({.folder = folder_ / "stage"});
  EXPECT_EQ(second.staged()->num_usable(), num_shards(second));
}

TEST_F(StagedShardsTest, CopiesStayBelowTheLimit) {
  Corpus staged = corpus();
  const std::int64_t bytes = staged.stream("train", "tokens").shard(0).bytes();
  testing::internal::CaptureStderr();
  staged.stage({.folder = folder_ / "stage", .max_bytes = 3 * bytes});
  ASSERT_TRUE(has_copies(staged, 3));
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_EQ(staged.staged()->num_usable(), 3);
  EXPECT_EQ(tokens(staged), tokens(corpus()));
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              HasSubstr("staged 3 of 8 shards in " + copies(staged).string()));
}

TEST_F(StagedShardsTest, ADamagedShardIsNotStaged) {
  const Corpus whole = corpus();
  const auto& shard = whole.stream("train", "tokens").shard(2);
  const std::string file = folder_ / ("corpus/" + shard.file());
  std::string bytes = read_text(file);
  bytes[static_cast<std::size_t>(shard.values_offset())] ^= 1;
  write_text(file, bytes);
  Corpus staged = corpus();
  testing::internal::CaptureStderr();
  staged.stage({.folder = folder_ / "stage"});
  ASSERT_TRUE(has_copies(staged, num_shards(staged) - 1));
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              HasSubstr(file + ": differs from its hash in the manifest, so it is not staged"));
  EXPECT_FALSE(staged.staged()->find(shard.file())->is_usable);
}

// Files of the stage folder that someone removes are read from the corpus again.
TEST_F(StagedShardsTest, CopiesMayVanish) {
  Corpus staged = corpus();
  staged.stage({.folder = folder_ / "stage"});
  ASSERT_TRUE(has_copies(staged, num_shards(staged)));
  fs::remove_all(folder_ / "stage");
  EXPECT_EQ(tokens(staged), tokens(corpus()));
}

// Damage of a copy, before or after pages of the corpus were checked, is seen; the corpus is read.
TEST_F(StagedShardsTest, ADamagedCopyIsDiscarded) {
  const std::vector<std::int64_t> expected = tokens(corpus());
  Corpus staged = corpus();
  const auto source = training_windows(staged, {.sequence_length = 100});
  staged.stage({.folder = folder_ / "stage"});
  ASSERT_TRUE(has_copies(staged, num_shards(staged)));
  const auto& shard = staged.stream("train", "tokens").shard(2);
  const std::string copy = (copies(staged) / shard.file()).string();
  std::string bytes = read_text(copy);
  bytes[static_cast<std::size_t>(shard.values_offset()) + 7] ^= 4;
  write_text(copy, bytes);
  testing::internal::CaptureStderr();
  EXPECT_EQ(tokens(staged), expected);
  const std::string told = testing::internal::GetCapturedStderr();
  EXPECT_THAT(told, HasSubstr("the copy is removed, and the corpus is read instead: " + copy));
  EXPECT_FALSE(fs::exists(copy));
  EXPECT_EQ(staged.staged()->num_usable(), num_shards(staged) - 1);
}

// Copies appear while a source reads: the pages of each copy are checked, although the same pages
// of the corpus were.
TEST_F(StagedShardsTest, PagesOfACopyAreCheckedAnew) {
  Corpus staged = corpus();
  staged.stage({.folder = folder_ / "stage", .makes_copies = false});
  const auto source = training_windows(staged, {.sequence_length = 100});
  const Batch expected = read_samples(*source, 0, source->num_samples());
  {
    Corpus maker = corpus();
    maker.stage({.folder = folder_ / "stage"});
    ASSERT_TRUE(has_copies(maker, num_shards(maker)));
  }
  const auto& shard = staged.stream("train", "tokens").shard(4);
  const std::string copy = (copies(staged) / shard.file()).string();
  std::string bytes = read_text(copy);
  bytes[static_cast<std::size_t>(shard.values_offset()) + 9] ^= 16;
  write_text(copy, bytes);
  ASSERT_TRUE(has_copies(staged, num_shards(staged)));
  testing::internal::CaptureStderr();
  EXPECT_TRUE(read_samples(*source, 0, source->num_samples())
                  .at(field::kInputs)
                  .equal(expected.at(field::kInputs)));
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("the copy is removed"));
}

TEST_F(StagedShardsTest, AVanishedCorpusIsToldOnceAndCopiesRemain) {
  Corpus staged = corpus();
  const auto& shards = staged.stream("train", "tokens").shard();
  fs::remove(folder_ / ("corpus/" + shards[2].file()));
  testing::internal::CaptureStderr();
  staged.stage({.folder = folder_ / "stage"});
  ASSERT_TRUE(has_copies(staged, 2));
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  const std::string told = testing::internal::GetCapturedStderr();
  EXPECT_THAT(told, HasSubstr("staging ends: "));
  EXPECT_THAT(told, HasSubstr("2 of 8 shards are copied"));
  EXPECT_EQ(std::count(told.begin(), told.end(), '\n'), 1) << told;
}

TEST_F(StagedShardsTest, AFullDiskEndsTheCopyingAndNothingElse) {
  const std::vector<std::int64_t> expected = tokens(corpus());
  set_file_fault_hook([](const char* call, const std::string& path, std::int64_t) {
    return std::string_view(call) == "write" && path.ends_with(".part") &&
                   path.find("3.h5.") != std::string::npos
               ? ENOSPC
               : 0;
  });
  testing::internal::CaptureStderr();
  {
    Corpus staged = corpus();
    staged.stage({.folder = folder_ / "stage"});
    EXPECT_TRUE(has_copies(staged, 3));
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    EXPECT_EQ(tokens(staged), expected);
  }
  set_file_fault_hook({});  // no thread calls it any more
  const std::string told = testing::internal::GetCapturedStderr();
  EXPECT_THAT(told, HasSubstr("3 of 8 shards are copied"));
  EXPECT_EQ(std::count(told.begin(), told.end(), '\n'), 1) << told;
  for (const auto& file : fs::directory_iterator(copies(corpus()))) {
    EXPECT_NE(file.path().extension(), ".part");
  }
}

// A process that is killed, at each of its calls on copies, leaves no file that looks complete, and
// the next goes on.
TEST_F(StagedShardsTest, AKilledProcessLosesOnlyTheUnfinishedCopy) {
  constexpr int kCalls = 12;  // of two copies and a part of the third
  int interrupted = 0;
  for (int call = 0; call < kCalls; ++call) {
    fs::remove_all(folder_ / "stage");
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      std::atomic<int> calls = 0;
      set_file_fault_hook([&](const char*, const std::string& path, std::int64_t) {
        if (path.ends_with(".part") && calls++ == call) raise(SIGKILL);
        return 0;
      });
      Corpus staged = corpus();
      staged.stage({.folder = folder_ / "stage"});
      std::this_thread::sleep_for(std::chrono::seconds(20));
      _exit(0);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << "copies make fewer calls than " << kCalls;
    for (const auto& file : fs::directory_iterator(copies(corpus()))) {
      interrupted += file.path().extension() == ".part";
    }
    Corpus staged = corpus();
    staged.stage({.folder = folder_ / "stage"});
    ASSERT_TRUE(has_copies(staged, num_shards(staged)));
    for (const auto& shard : staged.stream("train", "tokens").shard()) {
      EXPECT_EQ(read_text((copies(staged) / shard.file()).string()),
                read_text(folder_ / ("corpus/" + shard.file())));
    }
  }
  // All but kills at the calls that create a file.
  EXPECT_GE(interrupted, kCalls / 2);
}

TEST(StagingFolder, StartsWithAVariable) {
  setenv("BIRKHOFF_TEST_STAGE", "/scratch/job", 1);
  EXPECT_EQ(staging_folder("$BIRKHOFF_TEST_STAGE/corpus"), "/scratch/job/corpus");
  EXPECT_EQ(staging_folder("$BIRKHOFF_TEST_STAGE"), "/scratch/job");
  EXPECT_EQ(staging_folder("/local/$x"), "/local/$x");
  unsetenv("BIRKHOFF_TEST_STAGE");
  try {
    staging_folder("$BIRKHOFF_TEST_STAGE/corpus");
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kUsage);
    EXPECT_THAT(error.what(), HasSubstr("the environment variable BIRKHOFF_TEST_STAGE is not set"));
  }
}

}  // namespace
}  // namespace birkhoff
