// Separate from damage.cpp, because the headers of the two manifests declare functions with the
// same name.
#include <google/protobuf/util/json_util.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "cluster/base/files/checksum.h"
#include "runtime/checkpoint/manifest.h"
#include "tests/launcher/bad_input/damage.h"

namespace birkhoff {

void edit_checkpoint(const std::string& folder,
                     const std::function<void(configs::CheckpointManifest&)>& edit) {
  const std::string path = folder + "/manifest.json";
  configs::CheckpointManifest manifest;
  if (!google::protobuf::util::JsonStringToMessage(read_bytes(path), &manifest).ok())
    throw std::runtime_error(path);
  edit(manifest);
  write_bytes(path, manifest_text(manifest));
}

void forge_tensor(const std::string& folder, const std::string& file, const std::string& tensor,
                  float value, std::int64_t count) {
  std::string bytes = read_bytes(file);
  std::uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes.data(), sizeof header_bytes);
  const auto header = nlohmann::json::parse(bytes.substr(8, header_bytes));
  const auto& offsets = header.at(tensor).at("data_offsets");
  const std::size_t begin = 8 + header_bytes + offsets[0].get<std::size_t>();
  const std::size_t end = 8 + header_bytes + offsets[1].get<std::size_t>();
  for (std::int64_t i = 0; i < count; ++i) {
    std::memcpy(&bytes.at(begin + static_cast<std::size_t>(i) * sizeof value), &value,
                sizeof value);
  }
  write_bytes(file, bytes);
  accept_file(folder, file);
  edit_checkpoint(folder, [&](configs::CheckpointManifest& manifest) {
    for (auto& entry : *manifest.mutable_tensor()) {
      if (entry.key() != tensor) continue;
      entry.set_crc32c(crc32c(&bytes[begin], end - begin));
      entry.clear_block_crc32c();
      const auto block = static_cast<std::size_t>(manifest.block_bytes());
      for (std::size_t at = begin; at < end; at += block) {
        entry.add_block_crc32c(crc32c(&bytes[at], std::min(block, end - at)));
      }
    }
  });
}

}  // namespace birkhoff
