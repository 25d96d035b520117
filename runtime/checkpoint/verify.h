// Checks of a checkpoint's files against its manifest. All errors are Error(kCheckpoint), name the
// file and say what differs.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "runtime/checkpoint/commit.h"
#include "runtime/checkpoint/manifest.h"
#include "runtime/checkpoint/safetensors.h"

namespace birkhoff {

// The manifest's tensors, by file name.
using TensorsOfFile =
    std::map<std::string, std::vector<const configs::CheckpointManifest::Tensor*>>;
TensorsOfFile tensors_by_file(const configs::CheckpointManifest& manifest);

// The location of a tensor's bytes. First checks that the file's own header agrees with the
// manifest.
const SafetensorsEntry& find_entry(const SafetensorsReader& reader,
                                   const configs::CheckpointManifest::Tensor& tensor,
                                   const std::string& path);

void check_size(const std::string& path, const configs::CheckpointManifest::File& file);
void check_crc(std::uint32_t crc, std::uint32_t expected,
               const configs::CheckpointManifest::Tensor& tensor, const std::string& path);

// The finding of a verification: the first damaged file, or else the first that holds a non-finite
// value.
struct FileFinding {
  int file = -1;  // in the manifest's order; -1: nothing
  ExitCode code = ExitCode::kOk;
  std::string text;  // the name of a tensor or, if the code is not kOk, a message
};

// Verifies these files of the manifest, in increasing order, up to the first damaged one.
FileFinding verify_some_files(const CheckpointFolder& checkpoint, const std::vector<int>& files);

}  // namespace birkhoff
