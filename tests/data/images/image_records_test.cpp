#include "data/loader/image_records.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "data/loader/loader.h"
#include "tests/data/record_helpers.h"

namespace birkhoff {
namespace {

using Values = std::vector<std::uint8_t>;

// 40 images of 4 x 5 x 3 values in small shards.
class ImageRecordsTest : public testing::Test {
 protected:
  void SetUp() override {
    pixels_ = write_image_corpus(folder_ / "corpus", kImages, /*shard_rows=*/7);
    corpus_.emplace(folder_ / "corpus");
  }

  Values image(std::int64_t i) const {
    const auto* first = reinterpret_cast<const std::uint8_t*>(pixels_.data()) + i * kShape.values();
    return {first, first + kShape.values()};
  }
  static Values row_of(const Batch& batch, std::int64_t i) {
    const auto* first =
        batch.at(field::kImages).const_data_ptr<std::uint8_t>() + i * kShape.values();
    return {first, first + kShape.values()};
  }

  static constexpr std::int64_t kImages = 40;
  static constexpr ImageDims kShape{4, 5, 3};
  TemporaryFolder folder_;
  std::string pixels_;
  std::optional<Corpus> corpus_;
};

TEST_F(ImageRecordsTest, ImagesAndLabelsAreThoseOfTheCorpus) {
  EXPECT_EQ(image_dims(*corpus_, "train", "image"), kShape);
  const auto source = image_records(*corpus_, {.label = "label"});
  ASSERT_EQ(source->num_samples(), kImages);
  const Batch batch = read_samples(*source, 3, kImages);
  ASSERT_EQ(batch.at(field::kImages).sizes(), (std::vector<std::int64_t>{kImages - 3, 4, 5, 3}));
  for (std::int64_t i = 3; i < kImages; ++i) {
    EXPECT_EQ(row_of(batch, i - 3), image(i)) << i;
    EXPECT_EQ(batch.at(field::kLabels)[i - 3].item<std::int64_t>(), i % 3 == 0 ? 1 : 0);
    EXPECT_EQ(batch.sample_ids_B[i - 3].item<std::int64_t>(), i);
  }
  EXPECT_FALSE(read_samples(*image_records(*corpus_, {}), 0, 2).has(field::kLabels));
}

// Worked out by hand, on an image of 2 rows, 3 columns and 2 channels.
TEST(ImageChange, MirrorsThenMovesAndFillsWithZeros) {
  const Values image = {11, 12, 21, 22, 31, 32,  //
                        41, 42, 51, 52, 61, 62};
  const auto changed = [&](const ImageChange& change) {
    Values out(image.size(), 255);
    change_image(change, {2, 3, 2}, image.data(), out.data());
    return out;
  };
  EXPECT_EQ(changed({}), image);
  EXPECT_EQ(changed({.flipped = true}), (Values{31, 32, 21, 22, 11, 12,  //
                                                61, 62, 51, 52, 41, 42}));
  EXPECT_EQ(changed({.down = 1, .right = -1}), (Values{0, 0, 0, 0, 0, 0,  //
                                                       21, 22, 31, 32, 0, 0}));
  EXPECT_EQ(changed({.down = -1, .right = 2}), (Values{0, 0, 0, 0, 41, 42,  //
                                                       0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(changed({.flipped = true, .right = 1}), (Values{0, 0, 31, 32, 21, 22,  //
                                                            0, 0, 61, 62, 51, 52}));
}

TEST(ImageChange, IsUniformAndKeyedByEpochAndSample) {
  const ImageRecordOptions options{.shift = 2, .flip = true, .seed = 5};
  std::map<std::int64_t, int> down, right;
  int flipped = 0, repeated = 0;
  constexpr int kSamples = 10000;
  for (int i = 0; i < kSamples; ++i) {
    const ImageChange change = image_change(options, 3, i);
    EXPECT_EQ(change, image_change(options, 3, i));
    ++down[change.down];
    ++right[change.right];
    flipped += change.flipped;
    repeated += change == image_change(options, 4, i);
  }
  // Bounds of five standard deviations: sqrt(10,000 p (1 - p)) with p = 1/5, 1/2 and 1/50.
  for (const auto& counts : {down, right}) {
    ASSERT_EQ(counts.size(), 5U);
    for (std::int64_t i = -2; i <= 2; ++i) EXPECT_NEAR(counts.at(i), 2000, 5 * 40) << i;
  }
  EXPECT_NEAR(flipped, 5000, 5 * 50);
  EXPECT_NEAR(repeated, 200, 5 * 14);
  EXPECT_EQ(image_change({.seed = 5}, 3, 1), ImageChange());
  for (int i = 0; i < 100; ++i) {
    EXPECT_FALSE(image_change({.shift = 2}, 3, i).flipped);
    EXPECT_EQ(image_change({.flip = true}, 3, i).down, 0);
  }
}

// A batch over the end of an epoch, too; each image once an epoch.
TEST_F(ImageRecordsTest, EpochsHaveTheSameChangedImagesOnAnyNumberOfRanks) {
  constexpr std::int64_t kGlobal = 12, kSteps = 10;
  const ImageRecordOptions options{.label = "label", .shift = 1, .flip = true, .seed = 8};
  std::map<std::int64_t, Values> on_one_rank;
  for (const int size : {1, 2, 4}) {
    std::map<std::int64_t, Values> rows;
    for (int rank = 0; rank < size; ++rank) {
      TrainLoader loader(
          image_records(*corpus_, options),
          {.batches = {.global_batch = kGlobal, .seed = 3, .rank = rank, .size = size}}, 0);
      for (int step = 0; step < kSteps; ++step) {
        const Batch batch = loader.next();
        for (std::int64_t i = 0; i < batch.size(); ++i) {
          rows[batch.sample_ids_B[i].item<std::int64_t>()] = row_of(batch, i);
        }
      }
    }
    ASSERT_EQ(rows.size(), static_cast<std::size_t>(kGlobal * kSteps));
    if (size == 1) on_one_rank = rows;
    EXPECT_EQ(rows, on_one_rank) << size << " ranks";
  }
  for (const std::int64_t epoch : {0, 1}) {
    std::set<std::int64_t> found;
    for (std::int64_t place = 0; place < kImages; ++place) {
      const Values& row = on_one_rank.at(epoch * kImages + place);
      for (std::int64_t i = 0; i < kImages; ++i) {
        Values expected(row.size());
        change_image(image_change(options, epoch, i), kShape, image(i).data(), expected.data());
        if (expected == row) found.insert(i);
      }
    }
    EXPECT_EQ(found.size(), static_cast<std::size_t>(kImages)) << "epoch " << epoch;
  }
}

TEST_F(ImageRecordsTest, ErrorsNameWhatIsMissing) {
  const auto expect_refused = [&](const ImageRecordOptions& options,
                                  const std::vector<std::string>& fragments) {
    expect_error(
        ExitCode::kData, [&] { image_records(*corpus_, options); }, fragments);
    expect_error(
        ExitCode::kData, [&] { check_image_records(*corpus_, options); }, fragments);
  };
  expect_refused({.split = "valid"}, {"'valid'"});
  expect_refused({.image = "picture"}, {"'picture'", "image"});
  expect_refused({.image = "points"}, {"'points' of split 'train' is f32 [7, 3], not images"});
  expect_refused({.image = "label"}, {"'label' of split 'train' is u16 [], not images"});
  expect_refused({.label = "mood"}, {"'mood'", "label"});
  expect_refused({.label = "points"}, {"'points'", "holds no labels"});
}

}  // namespace
}  // namespace birkhoff
