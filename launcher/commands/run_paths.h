// From what a user names (a run folder or a checkpoint) to the checkpoint and the objects that
// commands need.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "data/corpus/corpus.h"
#include "models/model.h"
#include "runtime/checkpoint/checkpoint.h"

namespace birkhoff {

enum class PathKind { kCorpus, kRun, kCheckpoint };

// What a path holds, by its manifest or its layout. Nothing of ours: Error(kUsage).
PathKind kind_of(const std::filesystem::path& path);

// The checkpoint itself, or the newest valid one of a run folder. Changes nothing on disk.
CheckpointFolder checkpoint_of(const std::filesystem::path& path);

// The checkpoint itself, or all of a run folder's, oldest first; unverified. None:
// Error(kCheckpoint).
std::vector<std::filesystem::path> checkpoints_of(const std::filesystem::path& path);

// The model of a checkpoint with its parameters on a device, in this process alone.
struct LoadedModel {
  std::unique_ptr<Group> single;  // outlives the model
  std::unique_ptr<Model> model;
};
// Which values the parameters may have. A model that holds infinities or NaN computes nothing.
enum class ParameterValues { kFinite, kAny };
// Error(kNumerical) where a parameter has other values.
LoadedModel load_model(const CheckpointFolder& checkpoint, at::Device device,
                       ParameterValues values = ParameterValues::kFinite);

// The device that a command's --device names: "cpu" or "cuda". No GPU: Error(kUsage).
at::Device device_named(const std::string& name);

// The tokenizer a checkpoint carries.
std::unique_ptr<Tokenizer> tokenizer_of(const CheckpointFolder& checkpoint);

}  // namespace birkhoff
