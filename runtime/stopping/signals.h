// Signals that ask a run to save and stop: SIGTERM (Slurm, container runtimes), SIGUSR1 (sbatch
// --signal, and what `birkhoff train --ranks` sends to mpirun, which forwards it), SIGINT (Ctrl-C)
// and SIGHUP (the terminal has closed).
#pragma once

namespace birkhoff {

// While an object exists, these signals are only recorded; a second SIGINT ends the process, for a
// user who cannot wait. SIGINT and SIGHUP stay ignored if they were ignored before (nohup, a
// background job). At most one object at a time; the destructor restores the previous handlers.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  // The last signal received, 0 if none yet. This process only: ranks must agree before they act.
  int received() const;

  // From now on a second SIGINT is only recorded, too: for a process that must end others first.
  void note_second_interrupt();
  // Whether SIGINT came twice.
  bool interrupted_twice() const;
};

}  // namespace birkhoff
