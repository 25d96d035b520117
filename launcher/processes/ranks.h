// Where verbs that compute run: with how many threads, on which ranks. A verb that runs on ranks
// (`train`, `bench comm`) checks all it can with check_before_ranks(), then either starts ranks
// that run the same verb (supervise()), or is one and joins the others (run_in_world()).
#pragma once

#include <functional>
#include <optional>
#include <ostream>

#include "cluster/base/error.h"
#include "cluster/world.h"
#include "configs/config.pb.h"

namespace birkhoff {

// Threads of a process that shares its machine with local_ranks - 1 others: what OMP_NUM_THREADS
// says, else the cores this process may run on, shared with the ranks beside it unless the launcher
// has already given each its own. Error(kUsage) if OMP_NUM_THREADS is no number or too many. Local.
int threads_of_rank(int local_ranks);
// Error(code) about `what` if a step of so many threads would not end: more than 64 for each core
// of this machine. Local.
void check_threads(const char* what, int threads, ExitCode code);

// Ranks that a verb with `--ranks asked` will run on: those, else the ones that mpirun or srun
// announces. Error(kUsage) if both say so. Local.
int ranks_to_run_on(std::optional<int> asked);

// Calls `check`, which finds everything that can be wrong before MPI is started, so that it is said
// once and in one line; its Error is rethrown, later on ranks other than the first. Local.
void check_before_ranks(const std::function<void()>& check);

// Joins the world of ranks and returns what `run` returns. An error inside a world of several ends
// them all with its code. Ranks of different builds: Error(kUsage). Collective over all processes.
int run_in_world(const std::function<int(World&)>& run, std::ostream& err);

}  // namespace birkhoff
