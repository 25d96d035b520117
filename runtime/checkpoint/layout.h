// The layout of a checkpoint: the file, name and order of each tensor. docs/checkpoint_format.md
// describes the files. Local.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "configs/schema/checkpoint_manifest.pb.h"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/checkpoint/safetensors.h"
#include "runtime/checkpoint/tensor_part.h"

namespace birkhoff {

inline constexpr char kModelIndexName[] = "model.safetensors.index.json";
// The metadata of every file of tensors: Hugging Face's Transformers rejects files that do not name
// a framework.
inline const SafetensorsMetadata kPartMetadata = {{"format", "pt"}};

// Whole parameters and statistics are in the model files, which other programs read; everything
// else is in the rank's own file.
bool belongs_to_model(const TensorPart& part);
// Whether its owner writes the part. An empty one only names a tensor, but a tensor without
// elements is written as its only part.
bool is_written(const TensorPart& part);
// Bytes that the part takes in its owner's copy of the state, padding included.
std::int64_t staged_bytes(const TensorPart& part);
// The order in a file: the larger elements first, so that tensors are aligned to their element
// size.
void put_in_file_order(std::vector<const TensorPart*>& parts);

// number: from 1 to count. For model files, count is the number of ranks that own whole parameters.
std::string model_file_name(std::int64_t number, std::int64_t count);
std::string state_file_name(std::int64_t number, std::int64_t count);

// A whole number of elements of any dtype.
inline constexpr std::int64_t kCrcBlockBytes = 1 << 20;
// The part's entry in the manifest, complete except for file and CRCs.
configs::CheckpointManifest::Tensor manifest_entry(const TensorPart& part);
// The entry of a tensor of the manifest in the file that holds it, without offsets.
SafetensorsEntry safetensors_entry(const configs::CheckpointManifest::Tensor& tensor);
// The index that Python's loaders look for: which file holds which tensor of the model.
std::string index_text(const configs::CheckpointManifest& manifest);

// Sizes in bytes of the files of a checkpoint that was never written.
struct CheckpointSize {
  std::int64_t tensors = 0;       // parameters, statistics and optimizer state
  std::int64_t descriptions = 0;  // headers, index and manifest
  std::int64_t total() const { return tensors + descriptions; }
};
// The size that CheckpointWriter::save() of `num_ranks` ranks would write, without the tokenizer's
// file. `parts`: the parts of all ranks, each once; their data is not read.
CheckpointSize checkpoint_size(const CheckpointHeader& header, const std::vector<TensorPart>& parts,
                               int num_ranks);

}  // namespace birkhoff
