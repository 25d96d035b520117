// Signals that ask a run to save and end: SIGTERM (Slurm, container runtimes), SIGUSR1 (sbatch
// --signal, and what `birkhoff train --ranks` sends to mpirun, which forwards it), SIGINT (Ctrl-C)
// and SIGHUP (a terminal that is gone).
#pragma once

namespace birkhoff {

// From construction to destruction these signals are only noted; a second SIGINT ends the process,
// for a user who cannot wait. SIGINT and SIGHUP that were ignored before (nohup, a background job)
// stay ignored.
// At most one object at a time; the handlers that were there before come back afterwards.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  // The signal that came last, 0 if none came yet. This process only: ranks must agree before they
  // act.
  int received() const;

  // From now on a second SIGINT, too, is only noted: for a process that must end others first.
  void note_second_interrupt();
  // Whether SIGINT came twice.
  bool interrupted_twice() const;
};

}  // namespace birkhoff
