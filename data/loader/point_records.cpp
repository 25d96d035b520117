#include "data/loader/point_records.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>
#include <optional>
#include <utility>

#include "cluster/base/error.h"
#include "cluster/base/random/philox.h"
#include "data/corpus/label_reader.h"
#include "data/corpus/shard_reader.h"

namespace birkhoff {
namespace {

class PointRecords final : public SampleSource {
 public:
  PointRecords(const Corpus& corpus, const PointRecordOptions& options)
      : options_(options),
        stored_points_(corpus.record(options.split, options.points).shape(0)),
        sets_(corpus, corpus.record(options.split, options.points)) {
    if (!options.label.empty()) labels_.emplace(corpus, options.split, options.label);
  }

  std::int64_t num_samples() const override { return sets_.elements(); }

  Batch make_batch(std::int64_t rows) const override {
    Batch batch;
    batch.fields.emplace(field::kPoints,
                         at::empty({rows, options_.num_points, options_.dimensions}, at::kFloat));
    if (labels_) batch.fields.emplace(field::kLabels, at::empty({rows}, at::kLong));
    batch.sample_ids_B = at::empty({rows}, at::kLong);
    return batch;
  }

  void will_fill(const std::vector<Row>& rows) override {
    for (const Row& row : rows) sets_.will_read(row.sample, 1);
  }

  void fill(Batch& batch, const std::vector<Row>& rows) override {
    require(static_cast<std::int64_t>(rows.size()) == batch.size(), "one Row per row of the batch");
    auto* points = batch.at(field::kPoints).mutable_data_ptr<float>();
    auto* labels = labels_ ? batch.at(field::kLabels).mutable_data_ptr<std::int64_t>() : nullptr;
    auto* sample_ids = batch.sample_ids_B.mutable_data_ptr<std::int64_t>();
    std::vector<float> stored(static_cast<std::size_t>(stored_points_ * options_.dimensions));
    for (const Row& row : rows) {
      sets_.read_bytes(row.sample, 1, reinterpret_cast<char*>(stored.data()));
      make_points(options_, point_change(options_, stored_points_, row.epoch, row.sample),
                  stored.data(), points);
      points += options_.num_points * options_.dimensions;
      if (labels_) labels_->read(row.sample, 1, labels++);
      *sample_ids++ = row.id;
    }
  }

 private:
  const PointRecordOptions options_;
  const std::int64_t stored_points_;
  ShardSequence sets_;
  std::optional<LabelReader> labels_;
};

// Uniform in [low, high).
double uniform_in(double low, double high, std::uint32_t word) {
  return low + (high - low) * (word * 0x1p-32);
}

}  // namespace

PointChange point_change(const PointRecordOptions& options, std::int64_t stored_points,
                         std::int64_t epoch, std::int64_t sample) {
  // Layer 3: orders, shifts and images use the keys of layers 0 to 2 (sampler.cpp,
  // image_records.cpp).
  const std::uint64_t key =
      noise_key(options.seed, static_cast<std::uint64_t>(epoch), 3, NoisePurpose::kSampleOrder);
  const auto words_at = [&](std::int64_t counter) {
    return philox(key, static_cast<std::uint64_t>(sample), static_cast<std::uint64_t>(counter));
  };
  const auto words = words_at(0);
  const double most = options.rotation * std::numbers::pi;
  PointChange change{.indices = {},
                     .angle = uniform_in(-most, most, words[0]),
                     .scale = uniform_in(options.min_scale, options.max_scale, words[1])};
  if (!options.resample) return change;
  // The first steps of a Fisher-Yates shuffle, with 64 bits for each.
  std::vector<std::int64_t>& indices = change.indices;
  indices.resize(static_cast<std::size_t>(stored_points));
  std::iota(indices.begin(), indices.end(), 0);
  for (std::int64_t n = 0; n < options.num_points; ++n) {
    const auto drawn = words_at(1 + n);
    const std::uint64_t bits = (static_cast<std::uint64_t>(drawn[0]) << 32) | drawn[1];
    const std::uint64_t other = bits % static_cast<std::uint64_t>(stored_points - n);
    std::swap(indices[static_cast<std::size_t>(n)],
              indices[static_cast<std::size_t>(n) + static_cast<std::size_t>(other)]);
  }
  indices.resize(static_cast<std::size_t>(options.num_points));
  return change;
}

void make_points(const PointRecordOptions& options, const PointChange& change, const float* stored,
                 float* out) {
  const std::int64_t N = options.num_points, P = options.dimensions;
  require(P >= 2 || change.angle == 0, "points with 1 coordinate are not rotated");
  for (std::int64_t n = 0; n < N; ++n) {
    const std::int64_t from =
        change.indices.empty() ? n : change.indices[static_cast<std::size_t>(n)];
    std::copy_n(stored + from * P, P, out + n * P);
  }
  std::vector<double> mean_P(static_cast<std::size_t>(P));
  double divisor = 1;
  if (options.scaling != PointScaling::kAsStored) {
    for (std::int64_t i = 0; i < N * P; ++i) mean_P[static_cast<std::size_t>(i % P)] += out[i];
    for (double& mean : mean_P) mean /= static_cast<double>(N);
    double sum = 0, largest = 0;  // of squared distances
    for (std::int64_t n = 0; n < N; ++n) {
      double square = 0;
      for (std::int64_t p = 0; p < P; ++p) {
        const double x = out[n * P + p] - mean_P[static_cast<std::size_t>(p)];
        square += x * x;
      }
      sum += square;
      largest = std::max(largest, square);
    }
    divisor = std::sqrt(
        options.scaling == PointScaling::kRadius ? largest : sum / static_cast<double>(N * P));
    if (divisor == 0) divisor = 1;
  }
  const double factor = change.scale / divisor;
  const double cos = std::cos(change.angle), sin = std::sin(change.angle);
  std::vector<double> x_P(static_cast<std::size_t>(P));
  for (std::int64_t n = 0; n < N; ++n, out += P) {
    for (std::size_t p = 0; p < x_P.size(); ++p) x_P[p] = (out[p] - mean_P[p]) * factor;
    if (change.angle != 0) {
      const double x = x_P[0], y = x_P[1];
      x_P[0] = cos * x - sin * y;
      x_P[1] = sin * x + cos * y;
    }
    for (std::size_t p = 0; p < x_P.size(); ++p) out[p] = static_cast<float>(x_P[p]);
  }
}

void check_point_records(const Corpus& corpus, const PointRecordOptions& options) {
  const auto& entry = corpus.record(options.split, options.points);
  const auto fail_with = [&](const std::string& what) {
    fail(ExitCode::kData, "{}: record '{}' of split '{}' {}", corpus.folder().string(),
         options.points, options.split, what);
  };
  if (entry.dtype() != configs::CorpusManifest::f32 || entry.shape_size() != 2) {
    fail_with(fmt::format(
        "is {} [{}], not point sets, which are f32 [points, dimensions]; name a record of point "
        "sets in task.point_sets.points",
        configs::CorpusManifest::Dtype_Name(entry.dtype()), fmt::join(entry.shape(), ", ")));
  }
  if (entry.shape(1) != options.dimensions) {
    fail_with(
        fmt::format("has points of {} coordinates, but task.point_sets.dimensions is {}; set it to "
                    "{}",
                    entry.shape(1), options.dimensions, entry.shape(1)));
  }
  if (entry.shape(0) < options.num_points) {
    fail_with(
        fmt::format("has sets of {} points, but data.sequence_length is {}; set it to at "
                    "most {}",
                    entry.shape(0), options.num_points, entry.shape(0)));
  }
  if (entry.rows() == 0) fail_with("has no point set; prepare more data");
  if (!options.label.empty()) corpus.record(options.split, options.label);
}

std::unique_ptr<SampleSource> point_records(const Corpus& corpus,
                                            const PointRecordOptions& options) {
  check_point_records(corpus, options);
  return std::make_unique<PointRecords>(corpus, options);
}

}  // namespace birkhoff
