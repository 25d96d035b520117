// A whole training run: from a resolved configuration, a run folder and the world to checkpoints
// and figures.
#pragma once

#include <filesystem>

#include "cluster/world.h"
#include "runtime/trainer.h"

namespace birkhoff::configs {
class Config;
}

namespace birkhoff {

// Trains in `run_folder` from its newest valid checkpoint, or from the start where it has none.
// With `fresh` what an earlier run left there is moved aside first. Writes RUN/config.txtpb,
// RUN/log/rank-*.log, metrics, picture and checkpoints. Opens the process' Log: no other may be
// open. Collective over the world.
//
// Errors: Error(kConfig) if ranks have different configurations or a fixed field changed since the
// checkpoint (with the difference); Error(kData) if ranks see different corpora or the corpus
// changed; those of the parts. An error on one rank alone must end the others too (World::abort).
Outcome run_training(const configs::Config& config, const std::filesystem::path& run_folder,
                     bool fresh, World& world);

}  // namespace birkhoff
