// `--ranks N`: starts mpirun, supervises it, and turns its signals and codes into ours. On
// SIGTERM, Open MPI 4.1 ends its ranks before they can save. So every request to stop reaches them
// as SIGUSR1, on which they save and exit with 75.
#pragma once

#include <ostream>
#include <string>
#include <vector>

#include "runtime/signals.h"

namespace birkhoff {

// The supervisor sets this environment variable to tell its ranks that the user's terminal can show
// a progress bar.
inline constexpr const char* kProgressVariable = "BIRKHOFF_PROGRESS";

// Runs this program with `arguments` on `ranks` MPI ranks of this machine and returns the exit code
// to report. Passes on the requests that `signals` notes; a second SIGINT ends the ranks, and then
// this process, at once. However mpirun ends, no process that it started outlives the call.
// Error(kUsage) if there is no mpirun.
int supervise(int ranks, const std::vector<std::string>& arguments, StopSignals& signals,
              std::ostream& err);

// Maps mpirun's exit status (from waitpid) to a documented code; `why` receives a line for the
// user, or nothing. A rank ended by SIGUSR1 after a request to stop had not installed its handler
// yet.
int map_mpirun_status(int status, bool stop_requested, std::string& why);

}  // namespace birkhoff
