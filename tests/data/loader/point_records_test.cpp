#include "data/loader/point_records.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <numbers>
#include <set>

#include "data/loader/loader.h"
#include "tests/data/point_corpus.h"
#include "tests/data/record_helpers.h"

namespace birkhoff {
namespace {

using Floats = std::vector<float>;

constexpr std::int64_t kSets = 40, kStored = 7, kDimensions = 3;

PointRecordOptions options_of(std::int64_t num_points,
                              PointScaling scaling = PointScaling::kAsStored) {
  return {.num_points = num_points, .dimensions = kDimensions, .scaling = scaling};
}

// 40 sets of 7 x 3 values, with labels, and a record that holds no point sets.
class PointRecordsTest : public testing::Test {
 protected:
  void SetUp() override {
    using configs::CorpusManifest;
    const std::string folder = folder_ / "corpus";
    make_directory(folder);
    CorpusManifest manifest;
    manifest.set_format(shard_format::kManifestFormat);
    manifest.set_version(shard_format::kManifestVersion);
    auto& split = *manifest.add_split();
    split.set_name("train");
    split.mutable_counts()->set_documents(kSets);
    const auto add = [&](const CorpusManifest::Record& entry, const void* values) {
      RecordWriter writer(folder, "train", entry, /*shard_rows=*/7);
      writer.append(values, kSets);
      *split.add_record() = writer.finish();
    };
    for (std::int64_t i = 0; i < kSets * kStored * kDimensions; ++i) {
      values_.push_back(static_cast<float>(i * i % 101) / 8);
    }
    add(entry_of("points", CorpusManifest::f32, {kStored, kDimensions}), values_.data());
    const std::vector<std::uint8_t> pixels(kSets * 4);
    add(entry_of("image", CorpusManifest::u8, {2, 2, 1}), pixels.data());
    CorpusManifest::Record label = entry_of("label", CorpusManifest::u16);
    label.add_class_name("chair");
    label.add_class_name("table");
    std::vector<std::uint16_t> labels;
    for (std::int64_t i = 0; i < kSets; ++i) labels.push_back(i % 3 == 0 ? 1 : 0);
    add(label, labels.data());
    write_file_durably(folder + "/" + kCorpusManifestName, manifest_json(manifest));
    corpus_.emplace(folder);
  }

  const float* set(std::int64_t i) const { return values_.data() + i * kStored * kDimensions; }
  static Floats row_of(const Batch& batch, std::int64_t i, std::int64_t num_points) {
    const auto size = num_points * kDimensions;
    const auto* first = batch.at(field::kPoints).const_data_ptr<float>() + i * size;
    return {first, first + size};
  }

  TemporaryFolder folder_;
  Floats values_;
  std::optional<Corpus> corpus_;
};

TEST_F(PointRecordsTest, SamplesAreTheFirstPointsAndTheirLabels) {
  PointRecordOptions options = options_of(5);
  options.label = "label";
  const auto source = point_records(*corpus_, options);
  ASSERT_EQ(source->num_samples(), kSets);
  const Batch batch = read_samples(*source, 3, kSets);
  ASSERT_EQ(batch.at(field::kPoints).sizes(), (std::vector<std::int64_t>{kSets - 3, 5, 3}));
  for (std::int64_t i = 3; i < kSets; ++i) {
    EXPECT_EQ(row_of(batch, i - 3, 5), Floats(set(i), set(i) + 5 * kDimensions)) << i;
    EXPECT_EQ(batch.at(field::kLabels)[i - 3].item<std::int64_t>(), i % 3 == 0 ? 1 : 0);
    EXPECT_EQ(batch.sample_ids_B[i - 3].item<std::int64_t>(), i);
  }
  EXPECT_FALSE(read_samples(*point_records(*corpus_, options_of(5)), 0, 2).has(field::kLabels));
}

// Worked out by hand.
TEST(Points, AreStandardized) {
  const Floats stored = {0, 2, 1, 5, 2, -1, 1, 2 + std::numbers::sqrt2_v<float>};
  const auto made = [&](PointScaling scaling, const PointChange& change = {}) {
    PointRecordOptions options{.num_points = 3, .dimensions = 2, .scaling = scaling};
    Floats out(6, 77);
    make_points(options, change, stored.data(), out.data());
    return out;
  };
  EXPECT_EQ(made(PointScaling::kAsStored), Floats(stored.begin(), stored.begin() + 6));
  // Of the first three points, the mean is (1, 2), the squared distances are 1, 9 and 10.
  const Floats centered = {-1, 0, 0, 3, 1, -3};
  const auto expect_centered = [&](const Floats& found, double factor, double angle) {
    for (std::size_t n = 0; n < 3; ++n) {
      const double x = centered[2 * n] * factor, y = centered[2 * n + 1] * factor;
      EXPECT_NEAR(found[2 * n], std::cos(angle) * x - std::sin(angle) * y, 1e-6);
      EXPECT_NEAR(found[2 * n + 1], std::sin(angle) * x + std::cos(angle) * y, 1e-6);
    }
  };
  expect_centered(made(PointScaling::kDeviation), 1 / std::sqrt(20.0 / 6), 0);
  expect_centered(made(PointScaling::kRadius), 1 / std::sqrt(10.0), 0);
  expect_centered(made(PointScaling::kRadius, {.angle = 0.7, .scale = 1.5}), 1.5 / std::sqrt(10.0),
                  0.7);
  expect_centered(made(PointScaling::kDeviation, {.angle = std::numbers::pi / 2}),
                  1 / std::sqrt(20.0 / 6), std::numbers::pi / 2);
  // Chosen points: the second is the farthest from their mean.
  const Floats chosen = made(PointScaling::kRadius, {.indices = {2, 1, 2}});
  EXPECT_EQ(Floats(chosen.begin(), chosen.begin() + 2), Floats(chosen.begin() + 4, chosen.end()));
  EXPECT_NEAR(std::hypot(chosen[2], chosen[3]), 1, 1e-6);
}

TEST(Points, ThatAreAllEqualStayAtTheOrigin) {
  const Floats stored = {3, 4, 3, 4, 3, 4};
  for (const PointScaling scaling : {PointScaling::kDeviation, PointScaling::kRadius}) {
    Floats out(6, 77);
    make_points({.num_points = 3, .dimensions = 2, .scaling = scaling}, {.scale = 2}, stored.data(),
                out.data());
    EXPECT_EQ(out, Floats(6, 0));
  }
}

TEST(Points, RotateAboutTheThirdAxis) {
  const Floats stored = {1, 0, 5, 0, 2, 6};
  Floats out(6);
  make_points({.num_points = 2, .dimensions = 3, .scaling = PointScaling::kAsStored},
              {.angle = std::numbers::pi / 2}, stored.data(), out.data());
  const Floats expected = {0, 1, 5, -2, 0, 6};
  for (std::size_t i = 0; i < 6; ++i) EXPECT_NEAR(out[i], expected[i], 1e-6) << i;
}

TEST(PointChange, IsUniformAndKeyedByEpochAndSample) {
  const PointRecordOptions options{.num_points = 3,
                                   .dimensions = 3,
                                   .resample = true,
                                   .rotation = 0.1,
                                   .min_scale = 0.8,
                                   .max_scale = 1.25,
                                   .seed = 5};
  constexpr int kSamples = 10000;
  std::map<std::int64_t, int> chosen, first;
  double angles = 0, scales = 0;
  int repeated = 0;
  for (int i = 0; i < kSamples; ++i) {
    const PointChange change = point_change(options, kStored, 3, i);
    EXPECT_EQ(change, point_change(options, kStored, 3, i));
    ASSERT_EQ(change.indices.size(), 3U);
    EXPECT_EQ(std::set<std::int64_t>(change.indices.begin(), change.indices.end()).size(), 3U);
    for (const std::int64_t index : change.indices) ++chosen[index];
    ++first[change.indices[0]];
    EXPECT_LE(std::abs(change.angle), 0.1 * std::numbers::pi);
    EXPECT_GE(change.scale, 0.8);
    EXPECT_LE(change.scale, 1.25);
    angles += change.angle;
    scales += change.scale;
    repeated += change.angle == point_change(options, kStored, 4, i).angle;
  }
  // Bounds of five standard deviations: sqrt(10,000 p (1 - p)) with p = 3/7 and 1/7; the width of
  // an interval / sqrt(12 * 10,000).
  ASSERT_EQ(chosen.size(), 7U);
  for (const auto& [index, count] : chosen) EXPECT_NEAR(count, kSamples * 3.0 / 7, 5 * 50) << index;
  for (const auto& [index, count] : first) EXPECT_NEAR(count, kSamples / 7.0, 5 * 35) << index;
  EXPECT_NEAR(angles / kSamples, 0, 5 * 0.2 * std::numbers::pi / 346);
  EXPECT_NEAR(scales / kSamples, 1.025, 5 * 0.45 / 346);
  EXPECT_LE(repeated, 2);
  EXPECT_EQ(point_change({.num_points = 3, .seed = 5}, kStored, 3, 1), PointChange());
  std::vector<std::int64_t> all(7);
  const PointChange permuted = point_change({.num_points = 7, .resample = true}, kStored, 0, 0);
  EXPECT_EQ(std::set<std::int64_t>(permuted.indices.begin(), permuted.indices.end()).size(), 7U);
}

// A batch over the end of an epoch, too; each set once an epoch.
TEST_F(PointRecordsTest, EpochsHaveTheSameChangedSetsOnAnyNumberOfRanks) {
  constexpr std::int64_t kGlobal = 12, kSteps = 10, kPoints = 4;
  PointRecordOptions options = options_of(kPoints, PointScaling::kRadius);
  options.label = "label";
  options.resample = true;
  options.rotation = 0.5;
  options.min_scale = 0.5;
  options.seed = 8;
  std::map<std::int64_t, Floats> on_one_rank;
  for (const int size : {1, 2, 4}) {
    std::map<std::int64_t, Floats> rows;
    for (int rank = 0; rank < size; ++rank) {
      TrainLoader loader(
          point_records(*corpus_, options),
          {.batches = {.global_batch = kGlobal, .seed = 3, .rank = rank, .size = size}}, 0);
      for (int step = 0; step < kSteps; ++step) {
        const Batch batch = loader.next();
        for (std::int64_t i = 0; i < batch.size(); ++i) {
          rows[batch.sample_ids_B[i].item<std::int64_t>()] = row_of(batch, i, kPoints);
        }
      }
    }
    ASSERT_EQ(rows.size(), static_cast<std::size_t>(kGlobal * kSteps));
    if (size == 1) on_one_rank = rows;
    EXPECT_EQ(rows, on_one_rank) << size << " ranks";
  }
  for (const std::int64_t epoch : {0, 1}) {
    std::set<std::int64_t> found;
    for (std::int64_t place = 0; place < kSets; ++place) {
      const Floats& row = on_one_rank.at(epoch * kSets + place);
      for (std::int64_t i = 0; i < kSets; ++i) {
        Floats expected(row.size());
        make_points(options, point_change(options, kStored, epoch, i), set(i), expected.data());
        if (expected == row) found.insert(i);
      }
    }
    EXPECT_EQ(found.size(), static_cast<std::size_t>(kSets)) << "epoch " << epoch;
  }
}

TEST_F(PointRecordsTest, ErrorsNameWhatIsWrong) {
  const auto expect_refused = [&](const std::function<void(PointRecordOptions&)>& edit,
                                  const std::vector<std::string>& fragments) {
    PointRecordOptions options = options_of(5);
    edit(options);
    expect_error(
        ExitCode::kData, [&] { point_records(*corpus_, options); }, fragments);
  };
  expect_refused([](auto& o) { o.split = "valid"; }, {"'valid'"});
  expect_refused([](auto& o) { o.points = "cloud"; }, {"'cloud'", "points"});
  expect_refused(
      [](auto& o) { o.points = "image"; },
      {"'image' of split 'train' is u8 [2, 2, 1], not point sets", "task.point_sets.points"});
  expect_refused([](auto& o) { o.points = "label"; }, {"is u16 [], not point sets"});
  expect_refused([](auto& o) { o.dimensions = 2; },
                 {"'points' of split 'train' has points of 3 coordinates, but "
                  "task.point_sets.dimensions is 2; set it to 3"});
  expect_refused([](auto& o) { o.num_points = 8; },
                 {"has sets of 7 points, but data.sequence_length is 8; set it to at most 7"});
  expect_refused([](auto& o) { o.label = "mood"; }, {"'mood'", "label"});
  expect_refused([](auto& o) { o.label = "image"; }, {"'image'", "holds no labels"});
}

TEST(Points, OnALineAreScaledAndNotRotated) {
  const PointRecordOptions options{
      .num_points = 3, .dimensions = 1, .scaling = PointScaling::kAsStored};
  const Floats stored = {1, -2, 3};
  Floats out(3);
  make_points(options, {.scale = 2}, stored.data(), out.data());
  EXPECT_EQ(out, (Floats{2, -4, 6}));
  expect_error(ExitCode::kInternal,
               [&] { make_points(options, {.angle = 1}, stored.data(), out.data()); },
               {"points with 1 coordinate are not rotated"});
}

// A single point tells nothing about the class: all classes have the same distribution of points.
TEST(ClusterSets, HaveTheSamePointsInAllClasses) {
  constexpr int kDrawn = 4000;
  std::map<int, std::vector<double>> mean;  // by class: mean of x, y, x^2, y^2 and x y
  std::mt19937_64 random(3);
  for (int clusters = 2; clusters <= 5; ++clusters) {
    std::vector<double>& sums = mean[clusters];
    sums.assign(5, 0);
    for (int i = 0; i < kDrawn; ++i) {
      const Floats points = cluster_set({.points = 20}, clusters, random);
      ASSERT_EQ(points.size(), 40U);
      for (std::size_t n = 0; n < 40; n += 2) {
        const double x = points[n], y = points[n + 1];
        const double terms[] = {x, y, x * x, y * y, x * y};
        for (std::size_t t = 0; t < 5; ++t) sums[t] += terms[t] / (20 * kDrawn);
      }
    }
  }
  // The mean of a set's points is that of at least 2 centers, whose coordinates have standard
  // deviations of about 0.6. The mean of 4,000 sets then has one of 0.6 / sqrt(2 * 4000) = 0.007,
  // a difference of two means one of 0.01, and the bound is 5 of these.
  for (const auto& [clusters, sums] : mean) {
    for (std::size_t t = 0; t < 5; ++t) EXPECT_NEAR(sums[t], mean[2][t], 0.05) << clusters << t;
  }
}

}  // namespace
}  // namespace birkhoff
