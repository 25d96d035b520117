// `train --ranks N`: starts mpirun, stays beside it, and turns its signals and codes into ours.
// Open MPI 4.1 ends its ranks on SIGTERM before they can save, so SIGTERM, SIGINT and SIGUSR1 reach
// them as SIGUSR1, on which they save and exit 75.
#pragma once

#include <ostream>
#include <string>
#include <vector>

namespace birkhoff {

// The environment variable by which the supervisor tells its ranks that the user's terminal can
// show a progress bar.
inline constexpr const char* kProgressVariable = "BIRKHOFF_PROGRESS";

// Runs this program with `arguments` on `ranks` MPI ranks of this machine and returns the exit code
// to report. No mpirun: Error(kUsage).
int supervise(int ranks, const std::vector<std::string>& arguments, std::ostream& err);

// mpirun's exit status (of waitpid) to a documented code; `why` receives a line for the user, or
// nothing.
int map_mpirun_status(int status, std::string& why);

}  // namespace birkhoff
