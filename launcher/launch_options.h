// Options of the command line for the start of ranks by `--ranks`
// (launcher/processes/supervisor.h).
#pragma once

#include <optional>
#include <string>

namespace birkhoff {

struct LaunchOptions {
  std::optional<std::string> launcher;  // in a Slurm job: srun or mpirun; not set: srun
  std::string container;     // Apptainer image whose birkhoff the ranks run; empty: this program
  int launch_seconds = 300;  // maximum time for the start of all ranks
};

}  // namespace birkhoff
