// Initial values of a model from the weights of another one: of a run, a checkpoint, or a file that
// any program wrote.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "cluster/base/collectives/process_group.h"
#include "runtime/checkpoint/tensor_part.h"

namespace birkhoff::configs {
class WarmStart;
}

namespace birkhoff {

// The safetensors files that hold the weights in `from`: a run, whose newest valid checkpoint is
// taken, a checkpoint, or a file. Checkpoints are verified. Error(kCheckpoint) if there are none or
// they are damaged. Local.
std::vector<std::filesystem::path> weight_files(const std::filesystem::path& from);

struct WarmStartReport {
  std::int64_t taken = 0;                                 // tensors
  std::vector<std::pair<std::string, std::string>> kept;  // tensors that keep their values, and why
  std::vector<std::string> unused;                        // tensors of the files
};

// Fills the parameters and statistics among `parts` from tensors of the files, whose names are
// changed by warm_start.rename and whose types are converted. Every rank that holds a part reads
// it. Error(kConfig) if no tensor fits, or a rule fits no name. Error(kCheckpoint) if a file is no
// safetensors file.
WarmStartReport warm_start(const configs::WarmStart& warm_start,
                           const std::vector<std::filesystem::path>& files,
                           std::vector<TensorPart>& parts);

// warm_start() of a run's parts. Rank 0 finds the files, and logs the report. Collective over the
// world, whose ranks must see the same files.
void start_warm(const configs::WarmStart& from, ProcessGroup& world,
                std::vector<TensorPart>& parts);

}  // namespace birkhoff
