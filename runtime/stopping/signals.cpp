#include "runtime/stopping/signals.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>

#include "cluster/base/error.h"

namespace birkhoff {
namespace {

constexpr std::array<int, 4> kSignals{SIGTERM, SIGUSR1, SIGINT, SIGHUP};

// The only state that a signal handler may touch: lock-free atomics.
std::atomic<int> received_signal{0}, num_interrupts{0};
static_assert(std::atomic<int>::is_always_lock_free);
std::array<struct sigaction, kSignals.size()> previous_actions;
bool installed = false;

void note_signal(int signal) {
  received_signal.store(signal, std::memory_order_relaxed);
  if (signal == SIGINT) num_interrupts.fetch_add(1, std::memory_order_relaxed);
}

void install(int signal, int more_flags) {
  struct sigaction action {};
  action.sa_handler = note_signal;
  action.sa_flags = SA_RESTART | more_flags;  // a signal must not make a read or write fail
  sigemptyset(&action.sa_mask);
  require(sigaction(signal, &action, nullptr) == 0, "sigaction succeeds");
}

sigset_t all_signals() {
  sigset_t signals;
  sigemptyset(&signals);
  for (const int signal : kSignals) sigaddset(&signals, signal);
  return signals;
}

}  // namespace

StopSignals::StopSignals() {
  require(!installed, "one StopSignals at a time");
  installed = true;
  received_signal = num_interrupts = 0;
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    require(sigaction(kSignals[i], nullptr, &previous_actions[i]) == 0, "sigaction succeeds");
    const bool is_terminals = kSignals[i] == SIGINT || kSignals[i] == SIGHUP;
    if (is_terminals && previous_actions[i].sa_handler == SIG_IGN) continue;
    install(kSignals[i], kSignals[i] == SIGINT ? static_cast<int>(SA_RESETHAND) : 0);
  }
  const sigset_t signals = all_signals();
  pthread_sigmask(SIG_BLOCK, &signals, &mask_before_);
  thread_ = std::thread([this, signals] {
    pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
    ends_.acquire();
  });
}

StopSignals::~StopSignals() {
  ends_.release();
  thread_.join();
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    if (kSignals[i] == SIGTERM && received() != 0) {
      // When one rank has ended with 75, srun sends SIGTERM to the other ranks. Ranks that have
      // saved and are about to end must not look lost.
      std::signal(SIGTERM, SIG_IGN);
    } else {
      sigaction(kSignals[i], &previous_actions[i], nullptr);
    }
  }
  pthread_sigmask(SIG_SETMASK, &mask_before_, nullptr);
  installed = false;
}

int StopSignals::received() const { return received_signal.load(std::memory_order_relaxed); }

void StopSignals::note_second_interrupt() {
  const auto place = std::find(kSignals.begin(), kSignals.end(), SIGINT) - kSignals.begin();
  const bool ignored = previous_actions[static_cast<std::size_t>(place)].sa_handler == SIG_IGN;
  if (!ignored) install(SIGINT, 0);
}

bool StopSignals::interrupted_twice() const {
  return num_interrupts.load(std::memory_order_relaxed) >= 2;
}

void unblock_signals() {
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
}

}  // namespace birkhoff
