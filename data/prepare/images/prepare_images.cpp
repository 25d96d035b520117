#include "data/prepare/images/prepare_images.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <memory>

#include "cluster/base/collectives/process_group.h"
#include "cluster/base/error.h"
#include "cluster/base/files/checksum.h"
#include "cluster/base/files/file.h"
#include "cluster/base/text/plural.h"
#include "data/corpus/manifest.h"
#include "data/corpus/shard_format.h"
#include "data/images/image_decoder.h"
#include "data/images/image_shards.h"
#include "data/prepare/classes.h"
#include "data/prepare/corpus_source.h"
#include "data/prepare/input/documents.h"
#include "data/prepare/input/split_rule.h"
#include "data/prepare/out_folder.h"
#include "data/prepare/prepare_options.h"
#include "data/prepare/prepare_progress.h"

namespace birkhoff {
namespace {

using configs::CorpusManifest;

// So that the list of a shard's images stays small.
constexpr std::int64_t kMaxShardImages = 1 << 16;

int rank_of(const ProcessGroup* ranks) { return ranks == nullptr ? 0 : ranks->rank(); }

// The text identifies all that the shards depend on. What inspecting the files found may differ
// between commands and between ranks although the files are the same.
std::string identity_of(const CorpusManifest::Source& source, const ImageInput& input,
                        const Classes& classes) {
  std::string found = fmt::format("{}\n", fmt::join(classes.names(), "\n"));
  for (const auto& [reason, count] : input.damages().reasons) found += reason + "\n";
  return fmt::format("{}, input {}, {}, {} damaged, found {}", source.options(),
                     source.input_hash(), counted(input.scan().documents, "image"),
                     input.damages().images, xxh3_hex(found.data(), found.size()));
}

// One command, from found images to manifest.
class ImagePreparation {
 public:
  ImagePreparation(const PrepareOptions& options, const ImageOptions& images,
                   const OutFolder& folder, ImageInput& input, const Classes& classes,
                   const CorpusManifest::Source& source, ProgressReports& progress,
                   ProcessGroup* ranks)
      : options_(options),
        images_(images),
        ranks_(ranks),
        input_(input),
        classes_(classes),
        source_(source),
        progress_(progress),
        rule_(input.scan(), options.valid_fraction, options.test_fraction),
        shards_(folder.path(), identity_of(source, input, classes), images_entry(),
                labels_entry()) {
    shard_images_ =
        std::min(shard_format::shard_rows(images_entry(), images.shard_bytes), kMaxShardImages);
    if (rank_of(ranks_) == 0) folder.clear(shards_.resume());
    if (ranks_ == nullptr) return;
    shards_.set_finished(ranks_->broadcast_bytes(shards_.finished(), 0, "finished shards"));
    count_shards();
  }

  // The manifest is rank 0's.
  CorpusManifest run() {
    progress_.begin("read images", input_.bytes());
    const InputScan now = input_.for_each([this](const InputImage& image) { take(image); });
    if (now.hash != input_.scan().hash || now.documents != input_.scan().documents) {
      fail(ExitCode::kData,
           "the input changed while it was read ({}, then {}); start the command again",
           counted(input_.scan().documents, "image"), counted(now.documents, "image"));
    }
    for (const SplitIndex split : kSplits) {
      if (!ranges_[split].wanted.empty()) finish(split);
    }
    progress_.end(true);
    CorpusManifest manifest = new_manifest();
    if (ranks_ != nullptr) ranks_->barrier("all shards are written");
    if (rank_of(ranks_) != 0) return manifest;
    *manifest.mutable_source() = source_;
    for (const SplitIndex split : kSplits) {
      if (!rule_.has(split)) continue;
      *manifest.add_split() = shards_.split(kSplitNames[split], ranges_[split].shard, damages_);
      if (manifest.split().rbegin()->counts().documents() == 0) {
        fail_as_empty(
            split, options_.paths.front(),
            counted(input_.scan().documents, "image that can be read", "images that can be read"),
            options_);
      }
    }
    return manifest;
  }

  // Of the images that could not be read.
  const ImageDamages& damages() const { return damages_; }

 private:
  // The images of a split's next shard.
  struct Range {
    std::int64_t shard = 0, bytes = 0;
    std::vector<WantedImage> wanted;
    std::vector<std::string> labels;   // the classes that folders name; empty: the file says it
    std::vector<std::int64_t> shares;  // of the bytes
  };

  CorpusManifest::Record images_entry() const {
    const auto& [size, channels] = input_.shape();
    CorpusManifest::Record record = image_record(size.rows, size.columns, channels);
    if (images_.form.size) {
      record.set_resized(fmt::format("to cover {} by the triangle filter, cropped at the center",
                                     size_text(size)));
    }
    return record;
  }

  std::optional<CorpusManifest::Record> labels_entry() const {
    return input_.has_classes() ? std::optional(label_record(classes_.names())) : std::nullopt;
  }

  SplitIndex split_of(const InputImage& image) {
    return rule_.pieces(image.document).front().split;
  }

  // Each rank gets neighboring shards of each split, so that it reads few files of many images.
  void count_shards() {
    std::array<std::int64_t, 3> images = {};
    input_.for_each([&](const InputImage& image) { ++images[split_of(image)]; });
    for (std::size_t i = 0; i < images.size(); ++i)
      num_shards_[i] = (images[i] + shard_images_ - 1) / shard_images_;
    rule_.reset();
  }

  bool is_mine(SplitIndex split, std::int64_t shard) const {
    return ranks_ == nullptr || shard * ranks_->size() / num_shards_[split] == ranks_->rank();
  }

  void take(const InputImage& image) {
    const SplitIndex split = split_of(image);
    Range& range = ranges_[split];
    range.wanted.push_back(image.wanted);
    range.labels.emplace_back(image.document.label);
    range.shares.push_back(image.bytes);
    range.bytes += image.bytes;
    if (std::ssize(range.wanted) == shard_images_) finish(split);
  }

  // Writes the split's next shard, unless it is finished.
  void finish(SplitIndex split) {
    Range& range = ranges_[split];
    if (ranks_ != nullptr && range.shard >= num_shards_[split]) {
      fail(ExitCode::kData,
           "{} has more images than when they were counted; start the command again",
           options_.paths.front());
    }
    if (!is_mine(split, range.shard) || shards_.is_finished(kSplitNames[split], range.shard)) {
      progress_.skip(range.bytes);
    } else {
      shards_.write(kSplitNames[split], range.shard, read(decoders_[split], range));
    }
    const std::int64_t next = range.shard + 1;
    range = {};
    range.shard = next;
  }

  ShardImages read(std::unique_ptr<ImageDecoder>& decoder, const Range& range) {
    if (!decoder) decoder = std::make_unique<ImageDecoder>(images_.form);
    ShardImages images;
    images.pixels.reserve(range.wanted.size() *
                          static_cast<std::size_t>(shard_format::row_bytes(images_entry())));
    decoder->decode(range.wanted, [&](std::size_t i, const DecodedImage& decoded) {
      const std::string& path = range.wanted[i].path;
      progress_.add(range.shares[i]);
      if (!decoded.damage.empty()) return input_.damaged(decoded.damage, images.damages);
      input_.require_shape(path, decoded.image.shape);
      const auto& pixels = decoded.image.pixels;
      images.pixels.insert(images.pixels.end(), pixels.begin(), pixels.end());
      if (!input_.has_classes()) return;
      const std::string label =
          range.wanted[i].is_picture ? range.labels[i] : std::to_string(decoded.label);
      Document labeled;
      labeled.shown_path = path;
      labeled.label = label;
      images.labels.push_back(static_cast<std::uint16_t>(classes_.value_of(labeled)));
    });
    return images;
  }

  const PrepareOptions& options_;
  const ImageOptions& images_;
  ProcessGroup* const ranks_;
  ImageInput& input_;
  const Classes& classes_;
  const CorpusManifest::Source& source_;
  ProgressReports& progress_;
  SplitRule rule_;
  ImageShards shards_;
  std::int64_t shard_images_ = 0;
  std::array<std::int64_t, 3> num_shards_ = {};  // of each split, with several ranks
  std::array<Range, 3> ranges_;
  // One for each split, whose images are in the order of their files.
  std::array<std::unique_ptr<ImageDecoder>, 3> decoders_;
  ImageDamages damages_;
};

CorpusManifest::Source image_source(const PrepareOptions& options, const ImageOptions& images,
                                    const ImageInput& input) {
  const ImageShape& shape = input.shape();
  const std::string classes = fmt::format("{}", fmt::join(options.class_names, "\n"));
  CorpusManifest::Source source;
  source.set_options(fmt::format(
      "images {} x {}{}{}{}, {}, shard bytes {}{}", size_text(shape.size), shape.channels,
      images.form.size ? ", resized" : "", images.labels ? "" : ", unlabeled",
      images.skip_damaged ? ", damaged skipped" : "", shares_text(options), images.shard_bytes,
      classes.empty() ? "" : ", classes " + xxh3_hex(classes.data(), classes.size())));
  source.set_input_hash(input.scan().hash);
  return source;
}

void add_notes(const ImageDamages& damages, std::vector<std::string>& notes) {
  for (const auto& [reason, count] : damages.reasons) {
    notes.push_back(
        fmt::format("skipped {}{}", reason, count == 1 ? "" : fmt::format(" ({} images)", count)));
  }
  if (damages.images > 1)
    notes.push_back(fmt::format("skipped {} in all", counted(damages.images, "image")));
}

}  // namespace

PrepareResult prepare_images(const PrepareOptions& given, const ImageOptions& images,
                             const std::function<void(const PrepareProgress&)>& callback,
                             ProcessGroup* ranks) {
  const PrepareOptions options = checked_paths(given);
  const std::vector<InputPath> inputs = inputs_of(options);
  OutFolder folder(options.out);
  require_no_streams(inputs, "images cannot come through a pipe; give files or folders");
  for (const InputPath& input : inputs) folder.require_outside(input.path);
  ProgressReports progress(callback, 1);
  const bool is_first = rank_of(ranks) == 0;
  if (is_first) folder.begin();
  Classes classes(options.class_names, "image",
                  "does each folder hold a class? --unlabeled makes no labels");
  ImageInput input(images, inputs, folder, classes, progress, ranks);
  input.find();
  PrepareResult result;
  result.notes = input.notes();
  result.not_regular = input.scan().not_regular;
  if (input.scan().documents == 0 && input.damages().images > 0) {
    fail(ExitCode::kData,
         "{}: none of {} can be read; the first: {}; repair it or give other paths",
         inputs.front().path, counted(input.damages().images, "file"),
         input.damages().reasons.begin()->first);
  }
  require_documents(input.scan(), options, "images");
  if (!options.class_names.empty() && !input.has_classes()) {
    fail(ExitCode::kUsage, "{}: no image has a class, but --like gives {}; leave --like out",
         inputs.front().path, counted(std::ssize(options.class_names), "class", "classes"));
  }
  const CorpusManifest::Source source = image_source(options, images, input);
  const bool is_finished = ranks == nullptr
                               ? folder.finished()
                               : agree_on_input(*ranks, identity_of(source, input, classes),
                                                folder.finished(), "images");
  if (is_finished && is_first) {
    require_same(folder, source, "images", "of images only the times are recorded",
                 [](const auto&) { return false; });
    result.already_prepared = true;
  } else if (!is_finished) {
    ImagePreparation preparation(options, images, folder, input, classes, source, progress, ranks);
    const CorpusManifest manifest = preparation.run();
    if (!is_first) return result;
    ImageDamages damages = preparation.damages();
    damages.add(input.damages());
    add_notes(damages, result.notes);
    write_file_durably(folder.file(kCorpusManifestName), manifest_json(manifest));
  }
  folder.end();
  return result;
}

}  // namespace birkhoff
