#include "runtime/checkpoint/layout.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "runtime/checkpoint/manifest.h"

namespace birkhoff {

using configs::CheckpointManifest;

namespace {

constexpr std::int64_t kStagingAlignment = 64;

// The key in the safetensors file: the plain name of a whole tensor, else the name with box and
// range.
std::string part_key(const TensorPart& part) {
  if (part.region.is_whole()) {
    return part.name;
  }
  return fmt::format("{}@{}+{}[{}:{}]", part.name, fmt::join(part.region.box_offset, ","),
                     fmt::join(part.region.box_size, ","), part.region.flat_begin,
                     part.region.flat_end);
}

}  // namespace

bool belongs_to_model(const TensorPart& part) {
  return is_of_model(part.kind) && part.region.is_whole();
}

bool is_written(const TensorPart& part) { return part.data.numel() > 0 || part.region.is_whole(); }

std::int64_t staged_bytes(const TensorPart& part) {
  const auto bytes = static_cast<std::int64_t>(part.data.nbytes());
  return (bytes + kStagingAlignment - 1) / kStagingAlignment * kStagingAlignment;
}

void put_in_file_order(std::vector<const TensorPart*>& parts) {
  std::stable_sort(parts.begin(), parts.end(), [](const TensorPart* a, const TensorPart* b) {
    return a->data.element_size() > b->data.element_size();
  });
}

std::string model_file_name(std::int64_t number, std::int64_t count) {
  return fmt::format("model-{:05d}-of-{:05d}.safetensors", number, count);
}

std::string state_file_name(std::int64_t number, std::int64_t count) {
  return fmt::format("optimizer-{:05d}-of-{:05d}.safetensors", number, count);
}

CheckpointManifest::Tensor manifest_entry(const TensorPart& part) {
  CheckpointManifest::Tensor entry;
  entry.set_name(part.name);
  entry.set_kind(kind_name(part.kind));
  entry.set_dtype(safetensors_dtype(part.data.scalar_type()));
  entry.mutable_global_shape()->Assign(part.region.global_shape.begin(),
                                       part.region.global_shape.end());
  entry.mutable_box_offset()->Assign(part.region.box_offset.begin(), part.region.box_offset.end());
  entry.mutable_box_size()->Assign(part.region.box_size.begin(), part.region.box_size.end());
  entry.set_flat_begin(part.region.flat_begin);
  entry.set_flat_end(part.region.flat_end);
  entry.set_key(part_key(part));
  return entry;
}

SafetensorsEntry safetensors_entry(const CheckpointManifest::Tensor& tensor) {
  const TensorRegion region = region_of(tensor);
  SafetensorsEntry entry;
  entry.name = tensor.key();
  entry.dtype = tensor.dtype();
  entry.shape =
      region.is_whole() ? region.global_shape : std::vector<std::int64_t>{region.num_elements()};
  return entry;
}

std::string index_text(const CheckpointManifest& manifest) {
  nlohmann::ordered_json weight_map = nlohmann::ordered_json::object();
  std::int64_t elements_bytes = 0;
  for (const auto& tensor : manifest.tensor()) {
    if (is_of_model(kind_of(tensor.kind())) && region_of(tensor).is_whole()) {
      weight_map[tensor.key()] = tensor.file();
      elements_bytes +=
          region_of(tensor).num_elements() * safetensors_element_bytes(tensor.dtype());
    }
  }
  const nlohmann::ordered_json index = {{"metadata", {{"total_size", elements_bytes}}},
                                        {"weight_map", weight_map}};
  return index.dump(1) + "\n";
}

CheckpointSize checkpoint_size(const CheckpointHeader& header, const std::vector<TensorPart>& parts,
                               int num_ranks) {
  CheckpointManifest manifest = header;
  manifest.set_format(kCheckpointFormat);
  manifest.set_version(kCheckpointVersion);
  manifest.set_block_bytes(kCrcBlockBytes);
  manifest.set_ranks(num_ranks);
  std::map<int, std::vector<const TensorPart*>> model_files, state_files;  // by owner
  for (const TensorPart& part : parts) {
    if (!is_written(part)) continue;
    (belongs_to_model(part) ? model_files : state_files)[part.owner].push_back(&part);
  }
  CheckpointSize size;
  const std::string hash(32, '0');
  const auto add_file = [&](const std::string& name, std::int64_t bytes) {
    CheckpointManifest::File& file = *manifest.add_file();
    file.set_name(name);
    file.set_bytes(bytes);
    file.set_hash(hash);
  };
  const auto add_tensors = [&](const std::string& name, std::vector<const TensorPart*> of_file) {
    put_in_file_order(of_file);
    std::vector<SafetensorsEntry> entries;
    for (const TensorPart* part : of_file) {
      CheckpointManifest::Tensor& tensor = *manifest.add_tensor() = manifest_entry(*part);
      tensor.set_file(name);
      tensor.set_crc32c(UINT32_MAX);
      for (std::int64_t at = 0; at < static_cast<std::int64_t>(part->data.nbytes());
           at += kCrcBlockBytes) {
        tensor.add_block_crc32c(UINT32_MAX);
      }
      entries.push_back(safetensors_entry(tensor));
    }
    const auto header_bytes =
        static_cast<std::int64_t>(safetensors_header(entries, kPartMetadata).size());
    size.descriptions += header_bytes;
    size.tensors += entries.back().end;
    add_file(name, header_bytes + entries.back().end);
  };
  std::int64_t number = 0;
  for (const auto& [owner, of_file] : model_files) {
    add_tensors(model_file_name(++number, static_cast<std::int64_t>(model_files.size())), of_file);
  }
  for (const auto& [owner, of_file] : state_files) {
    add_tensors(state_file_name(owner + 1, num_ranks), of_file);
  }
  const auto index_bytes = static_cast<std::int64_t>(index_text(manifest).size());
  add_file(kModelIndexName, index_bytes);
  size.descriptions += index_bytes + static_cast<std::int64_t>(manifest_text(manifest).size());
  return size;
}

}  // namespace birkhoff
