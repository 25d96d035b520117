#include "data/loader/image_records.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "cluster/base/error.h"
#include "cluster/base/random/philox.h"
#include "data/corpus/label_reader.h"
#include "data/corpus/shard_reader.h"

namespace birkhoff {
namespace {

class ImageRecords final : public SampleSource {
 public:
  ImageRecords(const Corpus& corpus, const ImageRecordOptions& options)
      : options_(options),
        shape_(image_dims(corpus, options.split, options.image)),
        images_(corpus, corpus.record(options.split, options.image)) {
    if (!options.label.empty()) labels_.emplace(corpus, options.split, options.label);
  }

  std::int64_t num_samples() const override { return images_.elements(); }

  Batch make_batch(std::int64_t rows) const override {
    Batch batch;
    batch.fields.emplace(
        field::kImages, at::empty({rows, shape_.rows, shape_.columns, shape_.channels}, at::kByte));
    if (labels_) batch.fields.emplace(field::kLabels, at::empty({rows}, at::kLong));
    batch.sample_ids_B = at::empty({rows}, at::kLong);
    return batch;
  }

  void will_fill(const std::vector<Row>& rows) override {
    for (const Row& row : rows) {
      images_.will_read(row.sample, 1);
      if (labels_) labels_->will_read(row.sample, 1);
    }
  }

  void fill(Batch& batch, const std::vector<Row>& rows) override {
    require(static_cast<std::int64_t>(rows.size()) == batch.size(), "one Row per row of the batch");
    auto* images = batch.at(field::kImages).mutable_data_ptr<std::uint8_t>();
    auto* labels = labels_ ? batch.at(field::kLabels).mutable_data_ptr<std::int64_t>() : nullptr;
    auto* sample_ids = batch.sample_ids_B.mutable_data_ptr<std::int64_t>();
    std::vector<std::uint8_t> original(static_cast<std::size_t>(shape_.values()));
    for (const Row& row : rows) {
      const ImageChange change = image_change(options_, row.epoch, row.sample);
      const bool unchanged = change == ImageChange();
      std::uint8_t* const read = unchanged ? images : original.data();
      images_.read_bytes(row.sample, 1, reinterpret_cast<char*>(read));
      if (!unchanged) change_image(change, shape_, read, images);
      images += shape_.values();
      if (labels_) labels_->read(row.sample, 1, labels++);
      *sample_ids++ = row.id;
    }
  }

 private:
  const ImageRecordOptions options_;
  const ImageDims shape_;
  ShardSequence images_;
  std::optional<LabelReader> labels_;
};

}  // namespace

ImageChange image_change(const ImageRecordOptions& options, std::int64_t epoch,
                         std::int64_t sample) {
  if (options.shift == 0 && !options.flip) return {};
  // Layer 2: the order of samples and its shift use the keys of layers 0 and 1 (sampler.cpp).
  const std::uint64_t key =
      noise_key(options.seed, static_cast<std::uint64_t>(epoch), 2, NoisePurpose::kSampleOrder);
  const auto words = philox(key, static_cast<std::uint64_t>(sample), 0);
  const auto moved = [&](std::uint32_t word) {
    const auto choices = static_cast<std::uint64_t>(2 * options.shift + 1);
    return static_cast<std::int64_t>((word * choices) >> 32) - options.shift;
  };
  return {.flipped = options.flip && words[2] % 2 == 1,
          .down = moved(words[0]),
          .right = moved(words[1])};
}

void change_image(const ImageChange& change, const ImageDims& shape, const std::uint8_t* image,
                  std::uint8_t* out) {
  const std::int64_t channels = shape.channels;
  for (std::int64_t y = 0; y < shape.rows; ++y) {
    for (std::int64_t x = 0; x < shape.columns; ++x, out += channels) {
      const std::int64_t from_y = y - change.down, moved_x = x - change.right;
      const std::int64_t from_x = change.flipped ? shape.columns - 1 - moved_x : moved_x;
      if (from_y < 0 || from_y >= shape.rows || from_x < 0 || from_x >= shape.columns) {
        std::fill_n(out, channels, std::uint8_t{0});
      } else {
        std::copy_n(image + (from_y * shape.columns + from_x) * channels, channels, out);
      }
    }
  }
}

ImageDims image_dims(const Corpus& corpus, const std::string& split, const std::string& record) {
  const auto& entry = corpus.record(split, record);
  if (entry.dtype() != configs::CorpusManifest::u8 || entry.shape_size() != 3) {
    fail(ExitCode::kData,
         "{}: record '{}' of split '{}' is {} [{}], not images, which are u8 [rows, columns, "
         "channels]; name a record of images in task",
         corpus.folder().string(), record, split,
         configs::CorpusManifest::Dtype_Name(entry.dtype()), fmt::join(entry.shape(), ", "));
  }
  const ImageDims dims{entry.shape(0), entry.shape(1), entry.shape(2)};
  if (std::max({dims.rows, dims.columns, dims.channels}) > ImageDims::kMaxSize) {
    fail(ExitCode::kData,
         "{}: record '{}' of split '{}' has images of {}; models read at most {} rows, columns and "
         "channels",
         corpus.folder().string(), record, split, dims.text(), ImageDims::kMaxSize);
  }
  return dims;
}

void check_image_records(const Corpus& corpus, const ImageRecordOptions& options) {
  image_dims(corpus, options.split, options.image);
  if (!options.label.empty()) check_labels(corpus, options.split, options.label);
  if (corpus.record(options.split, options.image).rows() > 0) return;
  fail(ExitCode::kData, "{}: split '{}' has no image; prepare more images",
       corpus.folder().string(), options.split);
}

std::unique_ptr<SampleSource> image_records(const Corpus& corpus,
                                            const ImageRecordOptions& options) {
  check_image_records(corpus, options);
  return std::make_unique<ImageRecords>(corpus, options);
}

}  // namespace birkhoff
