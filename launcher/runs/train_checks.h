// The checks of `train` before a run starts, and of `submit` before it is queued.
#pragma once

#include <string>
#include <vector>

#include "configs/schema/config.pb.h"

namespace birkhoff {

// A run before its start: its configuration and folder.
struct PlannedRun {
  std::string config;  // file
  std::vector<std::string> settings;
  std::string run;     // folder
  bool fresh = false;  // moves an earlier run in the folder aside first
  int ranks = 1;
};

// Loads the configuration of a run. Values without effect are refused unless the run has
// checkpoints: one of an earlier version may have them and must still resume. run: empty: none.
configs::Config load_run_config(const std::string& file, const std::vector<std::string>& settings,
                                const std::string& run, bool fresh = false);

// Finds all errors that can be found on any machine before MPI starts, so that they are reported
// once and in one line: in the configuration, the corpus, the model, the run folder and the
// checkpoint to resume from. Returns the resolved configuration. Changes nothing.
configs::Config check_before_start(const PlannedRun& planned);

}  // namespace birkhoff
