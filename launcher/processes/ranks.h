// The threads and ranks on which subcommands compute. A subcommand that runs on ranks (`train`,
// `eval`, `bench comm`) first checks all it can with check_before_ranks(). Then it either starts
// ranks that run the same subcommand (supervise()), or is a rank itself and joins the world
// (run_in_world()).
#pragma once

#include <functional>
#include <optional>
#include <ostream>

#include "cluster/base/error.h"
#include "cluster/world.h"
#include "configs/schema/config.pb.h"

namespace birkhoff {

// Threads of a process that should compute on `cores` cores: OMP_NUM_THREADS if set, else one for
// each. Error(kUsage) if OMP_NUM_THREADS is not a number or is too large. Local.
int threads_of_rank(int cores);
// Error(code) about `what` if a step with this many threads would not end: if there are more than
// 64 per core of this machine. Local.
void check_threads(const char* what, int threads, ExitCode code);

// The number of ranks that a subcommand with `--ranks asked` will run on: `asked` if set, else the
// number that mpirun or srun announces. Error(kUsage) if both give one, or
// with --ranks under mpirun, which cannot start another. Local.
int ranks_to_run_on(std::optional<int> asked);

// Calls `check`, which finds all errors that can be found before MPI starts, so that an error is
// reported once and in one line. Rethrows its Error, later on ranks other than the first. Local.
void check_before_ranks(const std::function<void()>& check);

// Hash of the executable file of this process. Local.
std::string program_hash();

// Joins the world of ranks and returns the result of `run`. If there are several ranks, an error
// ends all of them with its code. Collective over all processes.
int run_in_any_world(const std::function<int(World&)>& run, std::ostream& err);
// The same, and Error(kUsage) if ranks run different builds.
int run_in_world(const std::function<int(World&)>& run, std::ostream& err);

}  // namespace birkhoff
