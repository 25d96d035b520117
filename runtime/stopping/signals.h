// Signals that ask a run to save and stop: SIGTERM (Slurm, container runtimes), SIGUSR1 (sbatch
// --signal, and what `birkhoff train --ranks` sends to mpirun, which forwards it), SIGINT (Ctrl-C)
// and SIGHUP (the terminal has closed).
#pragma once

#include <csignal>
#include <semaphore>
#include <thread>

namespace birkhoff {

// While an object exists, these signals are only recorded; a second SIGINT ends the process, for a
// user who cannot wait. SIGINT and SIGHUP stay ignored if they were ignored before (nohup, a
// background job). At most one object at a time; the destructor restores the previous handlers
// and the mask of its thread, which must be the one that constructed it.
//
// The handlers run on a thread of their own; the calling thread and those that it starts block the
// signals. While LibTorch's oneDNN computes a matrix product, the stack pointer may point to the
// heap, and a handler on that thread would write its frame there
// (https://github.com/uxlfoundation/oneDNN/issues/4845). So construct it before any such thread.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  // The last signal received, 0 if none yet. This process only: ranks must agree before they act.
  int received() const;

  // From now on a second SIGINT is only recorded, too: for a process that must end other processes
  // first.
  void note_second_interrupt();
  // Whether SIGINT came twice.
  bool interrupted_twice() const;

 private:
  sigset_t mask_before_;  // of the constructing thread
  std::binary_semaphore ends_{0};
  std::thread thread_;  // where the handlers run
};

// In a child between fork and exec: no signal is blocked, as programs expect. Async-signal-safe.
void unblock_signals();

}  // namespace birkhoff
