// manifest.json: the list of everything in a checkpoint folder, written last. Conversion to and
// from text, with every check that needs no other file. docs/checkpoint_format.md describes it.
#pragma once

#include <string>

#include "cluster/base/error.h"
#include "configs/schema/checkpoint_manifest.pb.h"
#include "runtime/checkpoint/tensor_part.h"

namespace birkhoff {

inline constexpr char kCheckpointManifestName[] = "manifest.json";
inline constexpr char kCheckpointFormat[] = "birkhoff checkpoint";
inline constexpr int kCheckpointVersion = 2, kOldestCheckpointVersion = 1;
inline constexpr std::int64_t kMaxManifestBytes = std::int64_t{256} << 20;

// An intact checkpoint in another version of the format: unusable, but not damaged.
class CheckpointVersionError : public Error {
 public:
  explicit CheckpointVersionError(const std::string& what) : Error(ExitCode::kCheckpoint, what) {}
};

// The content of manifest.json, its checksum first.
std::string manifest_text(const configs::CheckpointManifest& manifest);

// The defect of a manifest's values; empty if there is none. Checks the ranges of all numbers, that
// file names are plain, and that the listed parts make up each tensor exactly once.
std::string manifest_defect(const configs::CheckpointManifest& manifest);

// Reads a manifest back and checks checksum, format, version and manifest_defect(). `path` is for
// messages. Error(kCheckpoint); CheckpointVersionError.
configs::CheckpointManifest parse_checkpoint_manifest(const std::string& text,
                                                      const std::string& path);

TensorRegion region_of(const configs::CheckpointManifest::Tensor& tensor);

// "parameter", "optimizer", "statistic"
std::string kind_name(StateKind kind);
StateKind kind_of(const std::string& name);  // the reverse

// The bytes of a tensor that a CRC32C covers: manifest.block_bytes, or in version 1 all
// `tensor_bytes` of it.
std::int64_t crc_block_bytes(const configs::CheckpointManifest& manifest,
                             std::int64_t tensor_bytes);

}  // namespace birkhoff
