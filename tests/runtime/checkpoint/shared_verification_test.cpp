// Checkpoints verified by all ranks: the result and the error equal one process's, wherever the
// damage is.
#include "runtime/checkpoint/shared_verification.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <mutex>
#include <set>
#include <string_view>
#include <thread>

#include "cluster/base/error.h"
#include "cluster/base/files/file.h"
#include "tests/cluster/base/corruption.h"
#include "tests/cluster/base/thread_group.h"
#include "tests/runtime/checkpoint/checkpoint_fixture.h"

namespace birkhoff {
namespace {

constexpr int kSavingRanks = 4;

// What verification says: the tensor that is not finite, or the code and the message.
std::string outcome_of(const CheckpointVerifier& verify, const CheckpointFolder& checkpoint) {
  try {
    return "not finite: " + verify(checkpoint);
  } catch (const Error& error) {
    return std::to_string(static_cast<int>(error.code())) + ": " + error.what();
  }
}

std::string shared_outcome(const CheckpointFolder& checkpoint, int ranks) {
  std::string outcome;
  run_ranks(ranks, [&](ProcessGroup& world) {
    SharedVerification verification(world);
    if (world.rank() != 0) return verification.help();
    outcome = outcome_of(
        [&](const CheckpointFolder& folder) { return verification.verify(folder); }, checkpoint);
    // What was found must not stay.
    EXPECT_EQ(
        outcome_of([&](const CheckpointFolder& folder) { return verification.verify(folder); },
                   checkpoint),
        outcome);
    verification.finish();
  });
  return outcome;
}

class SharedVerificationTest : public testing::Test {
 protected:
  SharedVerificationTest() {
    save_step(folder_, 7, kSavingRanks, Layout::kFlatRanges);
    checkpoint_ = *find_newest_checkpoint(folder_, false);
  }
  std::string file(int i) const {
    return (checkpoint_.path / checkpoint_.manifest.file(i).name()).string();
  }

  TestFolder folder_;
  CheckpointFolder checkpoint_;
};

// The work is shared: with as many ranks as files, each rank reads one.
TEST_F(SharedVerificationTest, EveryFileIsReadByOneRank) {
  const int num_files = checkpoint_.manifest.file_size();
  for (const int ranks : {1, 2, 3, num_files, num_files + 3}) {
    std::mutex mutex;
    std::map<std::string, std::set<std::thread::id>> readers;
    std::set<std::thread::id> busy;
    set_file_fault_hook([&](const char* call, const std::string& path, std::int64_t) {
      if (std::string_view(call) != "open") return 0;
      const std::lock_guard lock(mutex);
      readers[path].insert(std::this_thread::get_id());
      busy.insert(std::this_thread::get_id());
      return 0;
    });
    run_ranks(ranks, [&](ProcessGroup& world) {
      SharedVerification verification(world);
      if (world.rank() != 0) return verification.help();
      verification.verify(checkpoint_);
      verification.finish();
    });
    set_file_fault_hook(nullptr);
    EXPECT_EQ(readers.size(), static_cast<std::size_t>(num_files));
    for (int i = 0; i < num_files; ++i) EXPECT_EQ(readers[file(i)].size(), 1u) << file(i);
    EXPECT_EQ(busy.size(), static_cast<std::size_t>(std::min(ranks, num_files)));
  }
}

TEST_F(SharedVerificationTest, AFlippedBitOfAnyShareGivesTheErrorOfOneProcess) {
  for (const int ranks : {1, 2, 3}) EXPECT_EQ(shared_outcome(checkpoint_, ranks), "not finite: ");
  for (int i = 0; i < checkpoint_.manifest.file_size(); ++i) {
    const std::int64_t bit = 8 * checkpoint_.manifest.file(i).bytes() - 5;
    flip_bit(file(i), bit);
    const std::string alone = outcome_of(verify_checkpoint, checkpoint_);
    EXPECT_THAT(alone, testing::HasSubstr(file(i)));
    for (const int ranks : {1, 2, 3}) EXPECT_EQ(shared_outcome(checkpoint_, ranks), alone);
    flip_bit(file(i), bit);
  }
}

TEST_F(SharedVerificationTest, TheFirstOfSeveralDamagedFilesIsNamed) {
  for (int i = checkpoint_.manifest.file_size() - 1; i >= 0; --i) {
    flip_bit(file(i), 8 * checkpoint_.manifest.file(i).bytes() - 5);
    const std::string alone = outcome_of(verify_checkpoint, checkpoint_);
    EXPECT_THAT(alone, testing::HasSubstr(file(i)));
    for (const int ranks : {2, 3, 5}) EXPECT_EQ(shared_outcome(checkpoint_, ranks), alone);
  }
}

TEST_F(SharedVerificationTest, AMissingFileIsNamed) {
  std::filesystem::remove(file(1));
  const std::string alone = outcome_of(verify_checkpoint, checkpoint_);
  EXPECT_THAT(alone, testing::HasSubstr(file(1)));
  for (const int ranks : {1, 2, 3}) EXPECT_EQ(shared_outcome(checkpoint_, ranks), alone);
}

TEST(SharedVerification, AValueThatIsNotFiniteIsFoundInAnyShare) {
  const TestFolder folder;
  run_ranks(kSavingRanks, [&](ProcessGroup& world) {
    std::vector<TensorPart> parts = make_parts(world.rank(), kSavingRanks, Layout::kFlatRanges);
    fill_parts(parts, 7);
    for (TensorPart& part : parts) {
      if (part.kind == StateKind::kOptimizer && part.data.is_floating_point()) {
        part.data.fill_(std::numeric_limits<double>::infinity());
      }
    }
    CheckpointWriter writer(folder, 2, {}, world);
    writer.save(make_header(7), parts);
    writer.finish();
  });
  const CheckpointFolder checkpoint = *find_newest_checkpoint(folder, false);
  const std::string alone = outcome_of(verify_checkpoint, checkpoint);
  EXPECT_THAT(alone, testing::HasSubstr("not finite: adamw."));
  for (const int ranks : {1, 2, 3}) EXPECT_EQ(shared_outcome(checkpoint, ranks), alone);
}

}  // namespace
}  // namespace birkhoff
