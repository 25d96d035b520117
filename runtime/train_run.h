// A whole training run: from a resolved configuration, a run folder and the world to checkpoints
// and figures.
#pragma once

#include <filesystem>
#include <functional>

#include "cluster/health/watchdog.h"
#include "cluster/world.h"
#include "data/corpus/corpus.h"
#include "runtime/trainer.h"

namespace birkhoff::configs {
class Config;
}

namespace birkhoff {

// What can be found wrong before MPI is started: a folder that is no run's, fixed fields or a
// corpus that changed since its newest checkpoint, a split that is too short. Errors as
// run_training's. Changes nothing, reads manifests only (a damaged one is left to run_training).
// Local.
void check_run(const configs::Config& config, const Corpus& corpus,
               const std::filesystem::path& run_folder, bool fresh);

// What a run takes from its process.
struct RunHooks {
  const StopSignals& signals;  // outlives MPI's end, so that a late one kills nobody
  // Called by the heartbeat's thread, at most once: the job hangs, and should be ended
  // (World::abort) with the verdict's code. May not return.
  std::function<void(const Verdict&)> on_hang;
};

// Trains in `run_folder` from its newest valid checkpoint, or from the start where it has none.
// With `fresh` what an earlier run left there is moved aside first. Writes RUN/config.txtpb,
// RUN/log/rank-*.log, metrics, picture and checkpoints. A run that has all its steps is left as it
// is. Opens the process' Log: no other may be open; an error is written to its file before it is
// thrown. Where ranks disagree and agreement.on_difference is restore, it begins anew from the last
// checkpoint. Collective over the world.
//
// Errors: Error(kConfig) if ranks have different configurations or a fixed field changed since the
// checkpoint (with the difference); Error(kData) if ranks see different corpora or the corpus
// changed; those of the parts. An error on one rank alone must end the others too (World::abort).
Outcome run_training(const configs::Config& config, const std::filesystem::path& run_folder,
                     bool fresh, World& world, const RunHooks& hooks);

}  // namespace birkhoff
