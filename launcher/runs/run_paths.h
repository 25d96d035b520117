// The checkpoint at a path from the user (a run folder or a checkpoint), and the objects that
// commands need of it.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "cluster/base/collectives/process_group.h"
#include "cluster/base/tensors/placement.h"
#include "data/corpus/corpus.h"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/tasks/task.h"

namespace birkhoff {

enum class PathKind { kCorpus, kRun, kCheckpoint };

// The kind of a path's content, according to its manifest or its layout. Error(kUsage) if it holds
// none of these.
PathKind kind_of(const std::filesystem::path& path);

// The checkpoint itself, or the newest valid one of a run folder. Changes nothing on disk.
CheckpointFolder checkpoint_of(const std::filesystem::path& path);

// The same, chosen by rank 0 for all ranks: a running training may save another one meanwhile.
// Collective over the world.
CheckpointFolder agreed_checkpoint(const std::string& path, ProcessGroup& world);

// The checkpoint itself, or all checkpoints of a run folder, oldest first; unverified.
// Error(kCheckpoint) if there are none.
std::vector<std::filesystem::path> checkpoints_of(const std::filesystem::path& path);

// The configuration of a checkpoint with evaluation-time `settings` (`path=value`). Its values are
// checked like those of a text. Error(kConfig) if a setting changes another field.
configs::Config config_of(const CheckpointFolder& checkpoint,
                          const std::vector<std::string>& settings = {});

// Error(kConfig) if a tensor axis of that many ranks cannot divide the model of a configuration.
void check_divides(int tensor_ranks, configs::Config config);

// The values that the model's tensors may have. A model with infinities or NaN cannot compute
// anything.
enum class ParameterValues { kFinite, kAny };
// This rank's part of a checkpoint's model, for the task of a configuration from config_of().
// Error(kConfig) if the ranks of the tensor axis cannot divide the model, Error(kNumerical) if a
// tensor has other values. Local.
std::unique_ptr<Model> load_model(const CheckpointFolder& checkpoint, const Task& task,
                                  const ModelPlacement& place,
                                  ParameterValues values = ParameterValues::kFinite);
// The same for the checkpoint's own configuration.
std::unique_ptr<Model> load_model(const CheckpointFolder& checkpoint, const ModelPlacement& place,
                                  ParameterValues values = ParameterValues::kFinite);

// The device that a command's --device names: "cpu" or "cuda", the GPU of this rank of the machine.
// Error(kUsage) if there is no GPU.
at::Device device_named(const std::string& name, int local_rank = 0);

// The tokenizer in a checkpoint.
std::unique_ptr<Tokenizer> tokenizer_of(const CheckpointFolder& checkpoint);
// That of the sources of a model of pairs, which may be the same.
std::unique_ptr<Tokenizer> source_tokenizer_of(const CheckpointFolder& checkpoint);

}  // namespace birkhoff
