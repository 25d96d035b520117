#include "runtime/signals.h"

#include <signal.h>

#include <array>
#include <atomic>

#include "cluster/base/error.h"

namespace birkhoff {
namespace {

constexpr std::array<int, 4> kSignals{SIGTERM, SIGUSR1, SIGINT, SIGHUP};

// All a signal handler may touch: a lock-free atomic.
std::atomic<int> received_signal{0};
static_assert(std::atomic<int>::is_always_lock_free);
std::array<struct sigaction, kSignals.size()> previous_actions;
bool installed = false;

void note_signal(int signal) { received_signal.store(signal, std::memory_order_relaxed); }

}  // namespace

StopSignals::StopSignals() {
  require(!installed, "one StopSignals at a time");
  installed = true;
  received_signal = 0;
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    struct sigaction action {};
    action.sa_handler = note_signal;
    action.sa_flags = SA_RESTART;  // a signal must not make a read or write fail
    if (kSignals[i] == SIGINT) action.sa_flags |= SA_RESETHAND;
    sigemptyset(&action.sa_mask);
    require(sigaction(kSignals[i], nullptr, &previous_actions[i]) == 0, "sigaction succeeds");
    const bool is_terminals = kSignals[i] == SIGINT || kSignals[i] == SIGHUP;
    if (is_terminals && previous_actions[i].sa_handler == SIG_IGN) continue;
    require(sigaction(kSignals[i], &action, nullptr) == 0, "sigaction succeeds");
  }
}

StopSignals::~StopSignals() {
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    sigaction(kSignals[i], &previous_actions[i], nullptr);
  }
  installed = false;
}

int StopSignals::received() const { return received_signal.load(std::memory_order_relaxed); }

}  // namespace birkhoff
