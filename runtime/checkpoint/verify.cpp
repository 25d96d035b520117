#include "runtime/checkpoint/verify.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "cluster/base/error.h"
#include "cluster/base/files/checksum.h"
#include "cluster/base/files/file.h"

namespace birkhoff {

using configs::CheckpointManifest;
using ManifestTensor = CheckpointManifest::Tensor;

TensorsOfFile tensors_by_file(const CheckpointManifest& manifest) {
  TensorsOfFile tensors;
  for (const auto& tensor : manifest.tensor()) {
    tensors[tensor.file()].push_back(&tensor);
  }
  return tensors;
}

const SafetensorsEntry& find_entry(const SafetensorsReader& reader, const ManifestTensor& tensor,
                                   const std::string& path) {
  const SafetensorsEntry* entry = reader.find(tensor.key());
  const TensorRegion region = region_of(tensor);
  if (entry == nullptr || entry->dtype != tensor.dtype() ||
      entry->num_bytes() != region.num_elements() * safetensors_element_bytes(tensor.dtype())) {
    fail(ExitCode::kCheckpoint,
         "{}: tensor '{}' is missing or differs from the manifest; use another checkpoint", path,
         tensor.key());
  }
  return *entry;
}

void check_size(const std::string& path, const CheckpointManifest::File& file) {
  const std::int64_t bytes = file_size(path, ExitCode::kCheckpoint);
  if (bytes != file.bytes()) {
    fail(ExitCode::kCheckpoint, "{}: {} bytes, the manifest says {}; use another checkpoint", path,
         bytes, file.bytes());
  }
}

void check_crc(std::uint32_t crc, std::uint32_t expected, const ManifestTensor& tensor,
               const std::string& path) {
  if (crc != expected) {
    fail(ExitCode::kCheckpoint,
         "{}: tensor '{}' is damaged: CRC32C {:08x}, the manifest says {:08x}; use another "
         "checkpoint",
         path, tensor.key(), crc, expected);
  }
}

namespace {

[[noreturn]] void fail_hash(const std::string& path) {
  fail(ExitCode::kCheckpoint, "{}: damaged: its hash is not the manifest's; use another checkpoint",
       path);
}

// Whether any element is infinite or NaN: its exponent bits are all ones. The bytes hold whole
// elements.
template <typename Bits>
bool has_full_exponent(const std::byte* data, std::size_t num_bytes, Bits exponent) {
  bool found = false;
  for (std::size_t at = 0; at < num_bytes; at += sizeof(Bits)) {
    Bits bits;
    std::memcpy(&bits, data + at, sizeof(Bits));
    found |= (bits & exponent) == exponent;
  }
  return found;
}

bool holds_non_finite(const std::byte* data, std::size_t num_bytes, const std::string& dtype) {
  if (dtype == "F32") return has_full_exponent<std::uint32_t>(data, num_bytes, 0x7f800000);
  if (dtype == "F64") return has_full_exponent<std::uint64_t>(data, num_bytes, 0x7ff0ull << 48);
  if (dtype == "BF16") return has_full_exponent<std::uint16_t>(data, num_bytes, 0x7f80);
  return false;
}

// One pass over header and tensors, which together are the whole file. Returns the first tensor
// that holds a non-finite value; empty if none does.
std::string verify_tensor_file(const std::string& path, const CheckpointManifest& manifest,
                               const CheckpointManifest::File& file,
                               const std::vector<const ManifestTensor*>& tensors) {
  const SafetensorsReader reader(path);
  std::map<const SafetensorsEntry*, const ManifestTensor*> listed;
  for (const ManifestTensor* tensor : tensors) {
    listed[&find_entry(reader, *tensor, path)] = tensor;
  }
  Xxh3Hasher hasher;
  const std::string header = reader.header_bytes();
  hasher.update(header.data(), header.size());
  const bool has_blocks = manifest.version() > 1;
  const std::int64_t piece_bytes = has_blocks ? manifest.block_bytes() : 8 << 20;
  std::vector<std::byte> piece(static_cast<std::size_t>(std::min(piece_bytes, file.bytes())));
  std::string non_finite;
  for (const SafetensorsEntry& entry : reader.entries()) {
    if (!listed.contains(&entry)) {
      fail(ExitCode::kCheckpoint, "{}: tensor '{}' is not in the manifest; use another checkpoint",
           path, entry.name);
    }
    const ManifestTensor& tensor = *listed.at(&entry);
    std::uint32_t crc = 0;
    int block = 0;
    for (std::int64_t at = entry.begin; at < entry.end; at += piece_bytes) {
      const auto length = static_cast<std::size_t>(std::min(piece_bytes, entry.end - at));
      reader.read(piece.data(), length, at);
      hasher.update(piece.data(), length);
      crc = crc32c(piece.data(), length, crc);
      if (has_blocks) {
        check_crc(crc32c(piece.data(), length), tensor.block_crc32c(block++), tensor, path);
      }
      if (non_finite.empty() && holds_non_finite(piece.data(), length, entry.dtype)) {
        non_finite = entry.name;
      }
    }
    check_crc(crc, tensor.crc32c(), tensor, path);
  }
  if (hasher.hex_digest() != file.hash()) {
    fail_hash(path);
  }
  return non_finite;
}

// Returns the name of the first tensor of the file that holds a non-finite value; empty if none
// does.
std::string verify_file(const CheckpointFolder& checkpoint, const TensorsOfFile& tensors,
                        const CheckpointManifest::File& file) {
  const std::string path = (checkpoint.path / file.name()).string();
  check_size(path, file);
  if (const auto found = tensors.find(file.name()); found != tensors.end()) {
    return verify_tensor_file(path, checkpoint.manifest, file, found->second);
  }
  if (xxh3_hex(File::open_for_read(path, ExitCode::kCheckpoint)) != file.hash()) fail_hash(path);
  return "";
}

}  // namespace

FileFinding verify_some_files(const CheckpointFolder& checkpoint, const std::vector<int>& files) {
  const TensorsOfFile tensors = tensors_by_file(checkpoint.manifest);
  FileFinding finding;
  for (const int file : files) {
    try {
      const std::string name = verify_file(checkpoint, tensors, checkpoint.manifest.file(file));
      if (finding.file < 0 && !name.empty()) finding = {file, ExitCode::kOk, name};
    } catch (const Error& error) {
      return {file, error.code(), error.what()};
    }
  }
  return finding;
}

std::string verify_checkpoint(const CheckpointFolder& checkpoint) {
  std::vector<int> all(static_cast<std::size_t>(checkpoint.manifest.file_size()));
  std::iota(all.begin(), all.end(), 0);
  const FileFinding finding = verify_some_files(checkpoint, all);
  if (finding.code != ExitCode::kOk) throw Error(finding.code, finding.text);
  return finding.text;
}

}  // namespace birkhoff
