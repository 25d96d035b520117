// The supervisor of `--ranks N`: it starts mpirun, or srun on the nodes of a Slurm job, and
// translates signals and exit codes. On SIGTERM, Open MPI 4.1 ends its ranks before they can save.
// So every request to stop reaches them as SIGUSR1, on which they save and exit with 75.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "launcher/processes/slurm_job.h"
#include "runtime/stopping/signals.h"

namespace birkhoff {

struct LaunchOptions;  // commands.h

// The supervisor sets this environment variable to tell its ranks that the user's terminal can show
// a progress bar.
inline constexpr const char* kProgressVariable = "BIRKHOFF_PROGRESS";

// The environment variable that marks the processes that a supervisor started, and with which it
// names the job. No two jobs have the same name, not even in different containers.
inline constexpr const char* kJobVariable = "BIRKHOFF_SUPERVISOR";

// The end of a job.
struct EndOfRanks {
  int code = 0;       // the exit code to report
  std::string why{};  // the supervisor's line for the user; empty: the ranks reported it
  std::string job{};  // its name
};

// Traces of a job's ranks that other processes can see.
struct TracesOfJob {
  bool began = false;  // its ranks run: their watchdog ends them if they hang
  int failure = 0;     // the exit code of the failure that a rank noted; 0: none
};

// The program that ranks run, and the way they are started.
struct RankProgram {
  bool by_mpirun = true;       // not by srun, which needs the nodes of a Slurm job
  std::string container = "";  // Apptainer image whose birkhoff they run; empty: this program
  // Looks for traces of the job of this name. A launcher is ended if it still runs two seconds
  // after a failure was noted, because it then waits for a lost node, or if the job has not begun
  // within launch_limit or 15 seconds after a request to stop. If `look` is empty, it is never
  // ended.
  std::function<TracesOfJob(const std::string& job)> look = {};
  std::chrono::seconds launch_limit{300};
};

// Error(kUsage) about a launcher outside of a Slurm job.
RankProgram rank_program(const LaunchOptions& options, bool in_slurm_job);

// The path of this program's file when this was first called.
std::string own_path();

// Runs the program with `arguments` on MPI ranks. Passes on the requests that `signals` notes; a
// second SIGINT ends the ranks, and then this process, at once. However the launcher ends, no
// process that it started here outlives the call. Error(kUsage) if there is no mpirun or srun.
EndOfRanks supervise(const Placement& placement, const RankProgram& program,
                     const std::vector<std::string>& arguments, StopSignals& signals,
                     std::ostream& err);

// Maps the exit status (from waitpid) of `launcher`, mpirun or srun, to a documented code; `why`
// receives a line for the user, or nothing. A rank ended by SIGUSR1 or SIGTERM (which Slurm sends
// to ranks, too) after a request to stop had not installed its handlers yet.
int map_launcher_status(const std::string& launcher, int status, bool stop_requested,
                        std::string& why);

}  // namespace birkhoff
