// Windows of a stream for evaluation with a stride, and parts of it that are read side by side.
#include <gtest/gtest.h>

#include <set>

#include "data/loader/target_counts.h"
#include "tests/data/loader/loader_fixture.h"

namespace birkhoff {
namespace {

using WindowsTest = LoaderTest;

// Also the short last window: 1,002 targets.
TEST_F(WindowsTest, WithAStrideEachTargetCountsOnceAfterALongContext) {
  for (const std::int64_t length : {1, 10, 64, 1001, 1002, 2000}) {
    for (const std::int64_t stride : {std::int64_t{1}, length / 3, length / 2, length}) {
      if (stride < 1) continue;
      SCOPED_TRACE(length);
      SCOPED_TRACE(stride);
      WindowOptions windows = options(length, 0).windows;
      windows.stride = stride;
      const auto source = evaluation_windows(*corpus_, windows);
      const std::int64_t after_first = std::max<std::int64_t>(kTokens - 1 - length, 0);
      ASSERT_EQ(source->num_samples(), 1 + (after_first + stride - 1) / stride);
      std::int64_t next = 1;
      for (std::int64_t i = 0; i < source->num_samples(); ++i) {
        const Batch batch = read_samples(*source, i, i + 1);
        const auto* mask = batch.at(field::kMask).const_data_ptr<std::uint8_t>();
        const auto* inputs = batch.at(field::kInputs).const_data_ptr<std::int64_t>();
        for (std::int64_t t = 0; t < length; ++t) {
          if (mask[t] == 0) continue;
          ASSERT_EQ(i * stride + t + 1, next);
          ASSERT_EQ(inputs[t], byte_at(next - 1));
          ASSERT_EQ(inputs[t + 1], byte_at(next));
          ASSERT_TRUE(i == 0 || t >= length - stride);
          ++next;
        }
        ASSERT_EQ(count_targets(*corpus_, windows, i + 1).tokens, next - 1);
      }
      EXPECT_EQ(next, kTokens);
    }
  }
}

// Position p of each batch reads on where position p of the batch before it ended, in every epoch,
// whatever ranks there are. No text is read twice in an epoch.
TEST_F(WindowsTest, LanesAreContiguousTextOnAnyNumberOfRanks) {
  constexpr std::int64_t kLength = 9, kLanes = 6;
  for (const bool shifts : {false, true}) {
    const auto make = [&](int rank, int size) {
      Options all = options(kLength, kLanes, rank, size);
      all.windows.lanes = kLanes;
      all.windows.shift_windows = shifts;
      all.loader.batches.lanes = true;
      return all;
    };
    const std::int64_t steps = (kTokens - 1 - (shifts ? kLength - 1 : 0)) / (kLength * kLanes);
    ASSERT_EQ(num_training_windows(*corpus_, make(0, 1).windows), steps * kLanes);
    WindowLoader whole(*corpus_, make(0, 1), 0);
    std::set<Numbers> first_tokens;
    std::vector<Numbers> batches;
    for (std::int64_t epoch = 0; epoch < 3; ++epoch) {
      Numbers before;
      for (std::int64_t step = 0; step < steps; ++step) {
        const Batch batch = whole.next();
        const Numbers inputs = inputs_of(batch);
        batches.push_back(inputs);
        const Numbers ids = sample_ids(batch);
        for (std::int64_t lane = 0; lane < kLanes; ++lane) {
          EXPECT_EQ(ids[static_cast<std::size_t>(lane)], (epoch * steps + step) * kLanes + lane);
          if (step > 0) {
            EXPECT_EQ(inputs[static_cast<std::size_t>(lane * kLength)],
                      before[static_cast<std::size_t>(lane)]);
          }
          EXPECT_EQ(batch.at(field::kMask)[lane].sum().item<std::int64_t>(), kLength);
        }
        before.clear();
        for (std::int64_t lane = 0; lane < kLanes; ++lane) {
          before.push_back(batch.at(field::kTargets)[lane][kLength - 1].item<std::int64_t>());
        }
        if (step == 0) first_tokens.insert(inputs);
      }
    }
    EXPECT_EQ(first_tokens.size(), shifts ? 3u : 1u);
    for (const int size : {2, 3, 4}) {
      for (const std::int64_t start : {std::int64_t{0}, steps + 2}) {
        std::vector<std::unique_ptr<WindowLoader>> ranks;
        for (int rank = 0; rank < size; ++rank) {
          ranks.push_back(
              std::make_unique<WindowLoader>(*corpus_, make(rank, size), start * kLanes));
        }
        for (std::int64_t step = start; step < start + 4; ++step) {
          Numbers joined;
          for (const auto& rank : ranks) {
            const Numbers part = inputs_of(rank->next());
            joined.insert(joined.end(), part.begin(), part.end());
          }
          EXPECT_EQ(joined, batches[static_cast<std::size_t>(step)]) << size;
        }
      }
    }
  }
}

// The text of the first epoch, part after part, is the stream.
TEST_F(WindowsTest, LanesTogetherAreTheTextFromItsStart) {
  constexpr std::int64_t kLength = 9, kLanes = 6;
  Options all = options(kLength, kLanes);
  all.windows.lanes = kLanes;
  const auto source = training_windows(*corpus_, all.windows);
  const Numbers inputs = inputs_of(read_samples(*source, 0, source->num_samples()));
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    ASSERT_EQ(inputs[i], byte_at(static_cast<std::int64_t>(i)));
  }
}

TEST_F(WindowsTest, TooManyLanesAreRefused) {
  WindowOptions windows = options(100, 0).windows;
  windows.lanes = 11;
  expect_error(ExitCode::kData, [&] { num_training_windows(*corpus_, windows); },
               {"1003 tokens", "100", "11 parts", "train.global_batch"});
  windows.lanes = 10;
  EXPECT_EQ(num_training_windows(*corpus_, windows), 10);
}

}  // namespace
}  // namespace birkhoff
