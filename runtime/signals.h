// Signals that ask a run to save and end: SIGTERM (Slurm, container runtimes) and SIGUSR1 (sbatch
// --signal, and what `birkhoff train --ranks` sends to mpirun, which forwards it).
#pragma once

namespace birkhoff {

// From construction to destruction SIGTERM and SIGUSR1 are only noted. At most one object at a
// time; the handlers that were there before come back afterwards.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  // The signal that came last, 0 if none came yet. This process only: ranks must agree before they
  // act.
  int received() const;
};

}  // namespace birkhoff
