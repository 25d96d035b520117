#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <thread>

#include "runtime/stopping/signals.h"

namespace birkhoff::test {

// Sends the signal to this process, and returns when `signals` has noted it.
inline void deliver(const StopSignals& signals, int signal) {
  kill(getpid(), signal);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (signals.received() != signal) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline) << signal << " is not noted";
    std::this_thread::yield();
  }
}

}  // namespace birkhoff::test
