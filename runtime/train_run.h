// A whole training run: from a resolved configuration, a run folder and the world to checkpoints
// and metrics.
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

// Finds problems that show before MPI starts: a folder that is not a run's, fixed fields or a
// corpus that changed since the newest checkpoint, a split that is too short. Errors as
// run_training's. Changes nothing and reads only manifests (run_training handles a damaged one).
// Local.
void check_run(const configs::Config& config, const Corpus& corpus,
               const std::filesystem::path& run_folder, bool fresh);

// What a run needs from its process.
struct RunHooks {
  StopRequest& stop;
  // The heartbeat's thread calls it at most once: the job hangs and should be ended (World::abort)
  // with the diagnosis's code. It need not return.
  std::function<void(const Diagnosis&)> on_hang;
  // What the run's history calls this job; empty: a name is made. A launcher that knows the name
  // can note the end of a job that could not do so itself.
  std::string job_id = {};
};

// Trains in `run_folder` from its newest valid checkpoint, or from the start if it has none. With
// `fresh`, the files of an earlier run are moved aside first. Writes RUN/config.txtpb,
// RUN/log/rank-*.log, metrics, the loss curve and checkpoints. A run that has done all its steps is
// left as it is. Opens the process's Log: no other may be open; an error is written to its file
// before it is thrown. If ranks disagree and agreement.on_difference is restore, training starts
// again from the last checkpoint. Notes its start and its end in the run's history. Collective over
// the world.
//
// Errors: Error(kConfig) if ranks have different configurations or a fixed field changed since the
// checkpoint (with the difference); Error(kData) if ranks see different corpora or the corpus
// changed; the errors of the parts. An error on only one rank must end the other ranks too
// (World::abort).
Outcome run_training(const configs::Config& config, const std::filesystem::path& run_folder,
                     bool fresh, World& world, const RunHooks& hooks);

}  // namespace birkhoff
