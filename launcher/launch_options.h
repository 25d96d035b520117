// How the command line asks `--ranks` to start ranks (launcher/processes/supervisor.h).
#pragma once

#include <optional>
#include <string>

namespace birkhoff {

struct LaunchOptions {
  std::optional<std::string> launcher;  // in a Slurm job: srun or mpirun; not set: srun
  std::string container;     // Apptainer image whose birkhoff the ranks run; empty: this program
  int launch_seconds = 300;  // the start of all ranks may take
};

}  // namespace birkhoff
