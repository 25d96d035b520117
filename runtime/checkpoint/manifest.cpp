#include "runtime/checkpoint/manifest.h"

#include <c10/util/accumulate.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <stdexcept>
#include <vector>

#include "configs/loader/check.h"
#include "configs/loader/checksummed_json.h"
#include "configs/loader/message_text.h"
#include "data/batch/image_dims.h"
#include "data/corpus/manifest.h"
#include "runtime/checkpoint/safetensors.h"
#include "runtime/gradients/loss_scale.h"

namespace birkhoff {
namespace {

using configs::CheckpointManifest;

constexpr std::size_t kHashDigits = 32;
// By StateKind.
constexpr std::string_view kKinds[] = {"parameter", "optimizer", "statistic", "memory"};

void check_range(std::int64_t value, std::int64_t least, const char* field) {
  reject_if(value < least, "{} is {}, below {}", field, value, least);
}

// A model of images keeps their size; other models have none.
void check_image_shape(const CheckpointManifest& manifest) {
  constexpr std::int64_t kMaxSize = ImageDims::kMaxSize;
  reject_if(manifest.image_shape_size() != 0 && manifest.image_shape_size() != 3,
            "image_shape has {} sizes, not rows, columns and channels",
            manifest.image_shape_size());
  for (const std::int64_t size : manifest.image_shape()) {
    reject_if(size < 1 || size > kMaxSize, "image_shape holds {}, not in [1, {}]", size, kMaxSize);
  }
  reject_if(manifest.image_shape().empty() && reads_images(manifest.config().task()),
            "image_shape is missing, and the task reads images");
}

// Of a model of pairs whose sources have another one than the targets.
void check_source_tokenizer(const CheckpointManifest& manifest) {
  if (!manifest.has_source_tokenizer()) return;
  const auto& tokenizer = manifest.source_tokenizer();
  check_range(tokenizer.vocabulary(), 1, "source_tokenizer.vocabulary");
  reject_if(tokenizer.file().find('/') != std::string::npos,
            "source_tokenizer.file '{}' is not a plain file name", tokenizer.file());
  reject_if(
      tokenizer.has_end_of_document() && (tokenizer.end_of_document() < 0 ||
                                          tokenizer.end_of_document() >= tokenizer.vocabulary()),
      "source_tokenizer.end_of_document is {}, not below the vocabulary of {}",
      tokenizer.end_of_document(), tokenizer.vocabulary());
}

void check_header(const CheckpointManifest& manifest) {
  check_range(manifest.ranks(), 1, "ranks");
  check_range(manifest.step(), 0, "step");
  constexpr std::int64_t kMostBlockBytes = std::int64_t{1} << 30;  // a reader allocates a block
  reject_if(manifest.version() > 1 &&
                (manifest.block_bytes() < 8 || manifest.block_bytes() > kMostBlockBytes ||
                 manifest.block_bytes() % 8 != 0),
            "block_bytes is {}, not a multiple of 8 up to {}", manifest.block_bytes(),
            kMostBlockBytes);
  check_range(manifest.consumed(), 0, "consumed");
  check_range(manifest.tokens(), 0, "tokens");
  check_range(manifest.skipped(), 0, "skipped");
  check_range(manifest.loss_scale_steps(), 0, "loss_scale_steps");
  reject_if(
      manifest.has_loss_scale() &&
          !(manifest.loss_scale() >= LossScale::kMin && manifest.loss_scale() <= LossScale::kMax),
      "loss_scale is {}, not in [{}, {}]", manifest.loss_scale(), LossScale::kMin, LossScale::kMax);
  reject_if(manifest.has_held_out_loss() && !std::isfinite(manifest.held_out_loss()),
            "held_out_loss is {}, not finite", manifest.held_out_loss());
  reject_if(manifest.has_lowest_loss() && !std::isfinite(manifest.lowest_loss()),
            "lowest_loss is {}, not finite", manifest.lowest_loss());
  check_range(manifest.stale_evaluations(), 0, "stale_evaluations");
  check_range(manifest.vocabulary(), 0, "vocabulary");
  check_source_tokenizer(manifest);
  if (const std::string defect = class_names_defect(manifest.class_name()); !defect.empty())
    throw std::invalid_argument(defect);
  const int classes = class_count(manifest.config().task());
  reject_if(manifest.class_name_size() != classes, "class_name has {} entries, the task {}",
            manifest.class_name_size(), classes);
  check_image_shape(manifest);
  check_range(manifest.metrics_bytes(), 0, "metrics_bytes");
  reject_if(manifest.has_end_of_document() && (manifest.end_of_document() < 0 ||
                                               manifest.end_of_document() >= manifest.vocabulary()),
            "end_of_document is {}, not below the vocabulary of {}", manifest.end_of_document(),
            manifest.vocabulary());
}

std::set<std::string> check_files(const CheckpointManifest& manifest) {
  std::set<std::string> names;
  for (const auto& file : manifest.file()) {
    const std::string& name = file.name();
    reject_if(name.empty() || name.front() == '.' || name.find('/') != std::string::npos ||
                  name.find('\0') != std::string::npos || name == kCheckpointManifestName,
              "'{}' is not a plain file name", name);
    reject_if(!names.insert(name).second, "file '{}' is listed twice", name);
    check_range(file.bytes(), 0, "a file's bytes");
    reject_if(file.hash().size() != kHashDigits, "file '{}' has no XXH3-128 hash", name);
  }
  return names;
}

// Checks the parts of one tensor: all describe the same tensor, and hold each element exactly
// once.
void check_tiling(const std::vector<const CheckpointManifest::Tensor*>& pieces) {
  const auto& first = *pieces.front();
  std::vector<TensorRegion> regions;
  std::int64_t elements = 0;
  for (const auto* piece : pieces) {
    const TensorRegion region = region_of(*piece);
    if (const std::string defect = region_defect(region); !defect.empty()) {
      throw std::invalid_argument(defect);
    }
    reject_if(region.global_shape != region_of(first).global_shape ||
                  piece->dtype() != first.dtype() || piece->kind() != first.kind(),
              "its parts differ in shape, dtype or kind");
    for (const TensorRegion& other : regions) {
      for_each_common_run(region, other, [](const CommonRun&) {
        throw std::invalid_argument("two of its parts overlap");
      });
    }
    elements += region.num_elements();
    regions.push_back(region);
  }
  const std::int64_t expected = c10::multiply_integers(regions.front().global_shape);
  reject_if(elements != expected, "its parts hold {} of {} elements", elements, expected);
}

void check_tensors(const CheckpointManifest& manifest, const std::set<std::string>& files) {
  std::map<std::string, std::vector<const CheckpointManifest::Tensor*>> pieces;
  std::set<std::pair<std::string, std::string>> keys;
  for (const auto& tensor : manifest.tensor()) {
    reject_if(
        tensor.name().empty() || safetensors_element_bytes(tensor.dtype()) == 0 ||
            std::ranges::find(kKinds, tensor.kind()) == std::end(kKinds) ||
            !files.contains(tensor.file()) || !keys.emplace(tensor.file(), tensor.key()).second,
        "tensor '{}': unknown dtype '{}', kind '{}' or file '{}', or its key '{}' is used twice",
        tensor.name(), tensor.dtype(), tensor.kind(), tensor.file(), tensor.key());
    pieces[tensor.name()].push_back(&tensor);
  }
  for (const auto& [name, parts] : pieces) {
    try {
      check_tiling(parts);
    } catch (const std::invalid_argument& error) {
      throw std::invalid_argument(fmt::format("tensor '{}': {}", name, error.what()));
    }
  }
  if (manifest.version() < 2) return;
  for (const auto& tensor : manifest.tensor()) {
    const std::int64_t in_block =
        manifest.block_bytes() / safetensors_element_bytes(tensor.dtype());
    const std::int64_t elements = region_of(tensor).num_elements();
    reject_if(tensor.block_crc32c_size() != elements / in_block + (elements % in_block > 0),
              "tensor '{}': {} elements have {} CRCs of blocks of {} bytes", tensor.name(),
              elements, tensor.block_crc32c_size(), manifest.block_bytes());
  }
}

}  // namespace

std::string manifest_defect(const CheckpointManifest& manifest) {
  try {
    check_header(manifest);
    check_tensors(manifest, check_files(manifest));
    return "";
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
}

std::string manifest_text(const CheckpointManifest& manifest) {
  CheckpointManifest without_checksum = manifest;
  without_checksum.clear_checksum();
  return checksummed_json(without_checksum);
}

CheckpointManifest parse_checkpoint_manifest(const std::string& text, const std::string& path) {
  try {
    CheckpointManifest manifest;
    parse_checksummed_json(text, Checksum::kRequired, manifest);
    reject_if(manifest.format() != kCheckpointFormat, "format '{}' is not '{}'", manifest.format(),
              kCheckpointFormat);
    if (manifest.version() < kOldestCheckpointVersion || manifest.version() > kCheckpointVersion) {
      throw CheckpointVersionError(fmt::format(
          "{}: format version {}, this program reads versions {} to {}: use the program "
          "that wrote it ({})",
          path, manifest.version(), kOldestCheckpointVersion, kCheckpointVersion,
          printable(manifest.program())));
    }
    if (const std::string defect = manifest_defect(manifest); !defect.empty()) {
      throw std::invalid_argument(defect);
    }
    return manifest;
  } catch (const std::invalid_argument& error) {
    fail(ExitCode::kCheckpoint, "{}: damaged manifest: {}; use another checkpoint", path,
         printable(error.what()));
  }
}

TensorRegion region_of(const CheckpointManifest::Tensor& tensor) {
  TensorRegion region;
  region.global_shape.assign(tensor.global_shape().begin(), tensor.global_shape().end());
  region.box_offset.assign(tensor.box_offset().begin(), tensor.box_offset().end());
  region.box_size.assign(tensor.box_size().begin(), tensor.box_size().end());
  region.flat_begin = tensor.flat_begin();
  region.flat_end = tensor.flat_end();
  return region;
}

StateKind kind_of(const std::string& name) {
  const auto found = std::ranges::find(kKinds, name);
  require(found != std::end(kKinds), "a kind of kind_name()");
  return static_cast<StateKind>(found - std::begin(kKinds));
}

std::int64_t crc_block_bytes(const CheckpointManifest& manifest, std::int64_t tensor_bytes) {
  return manifest.version() < 2 ? std::max<std::int64_t>(tensor_bytes, 1) : manifest.block_bytes();
}

std::string kind_name(StateKind kind) {
  return std::string(kKinds[static_cast<std::size_t>(kind)]);
}

}  // namespace birkhoff
