// The mean of the models of several checkpoints of a run: averaged weights often predict better
// than the last ones (T2T's avg_checkpoints; Vaswani et al. 2017, section 6.1).
#pragma once

#include <filesystem>
#include <vector>

#include "runtime/checkpoint/checkpoint.h"

namespace birkhoff {

// Writes a checkpoint with the mean of the parameters and floating-point statistics into `folder`,
// as CheckpointWriter does; everything else in it is of the last checkpoint, except that it has no
// optimizer state, so no run can resume from it. Sums are in fp64, in the order of the checkpoints,
// and the mean is rounded once. Error(kCheckpoint) if their models do not have the same tensors;
// nothing is then written. Returns the new checkpoint. Local.
std::filesystem::path average_checkpoints(const std::vector<CheckpointFolder>& checkpoints,
                                          const std::filesystem::path& folder);

}  // namespace birkhoff
