// Requests to stop, while they are noted and afterwards.
#include "runtime/stopping/signals.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>

#include "cluster/base/error.h"

namespace birkhoff {
namespace {

TEST(StopSignals, AreNotedAndTheOldHandlersComeBack) {
  struct sigaction terminate {};
  sigaction(SIGTERM, nullptr, &terminate);
  for (const int signal : {SIGTERM, SIGUSR1, SIGINT, SIGHUP}) {
    struct sigaction before {
    }, after{};
    sigaction(signal, nullptr, &before);
    {
      const StopSignals signals;
      EXPECT_EQ(signals.received(), 0);
      raise(signal);
      EXPECT_EQ(signals.received(), signal);
      EXPECT_THROW(StopSignals(), Error);  // one at a time
    }
    sigaction(signal, nullptr, &after);
    EXPECT_EQ(after.sa_handler, signal == SIGTERM ? SIG_IGN : before.sa_handler);
    sigaction(SIGTERM, &terminate, nullptr);
  }
}

TEST(StopSignals, ASecondInterruptEndsTheProcess) {
  EXPECT_EXIT(
      {
        const StopSignals signals;
        raise(SIGINT);
        raise(SIGINT);
      },
      testing::KilledBySignal(SIGINT), "");
}

TEST(StopSignals, ASecondInterruptIsNotedWhereThatIsAskedFor) {
  StopSignals signals;
  raise(SIGINT);
  signals.note_second_interrupt();
  raise(SIGTERM);
  EXPECT_FALSE(signals.interrupted_twice());
  raise(SIGINT);
  EXPECT_TRUE(signals.interrupted_twice());
}

TEST(StopSignals, AnIgnoredTerminalStaysIgnored) {
  for (const int signal : {SIGHUP, SIGINT, SIGTERM, SIGUSR1}) {
    ::signal(signal, SIG_IGN);
    {
      StopSignals signals;
      signals.note_second_interrupt();
      raise(signal);
      const bool is_terminals = signal == SIGHUP || signal == SIGINT;
      EXPECT_EQ(signals.received(), is_terminals ? 0 : signal);
    }
    ::signal(signal, SIG_DFL);
  }
}

TEST(StopSignalsDeathTest, AfterARequestAnotherSigtermDoesNotKill) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        {
          const StopSignals signals;
          std::raise(SIGTERM);
        }
        std::raise(SIGTERM);
        _exit(75);
      },
      testing::ExitedWithCode(75), "");
}

TEST(StopSignalsDeathTest, WithoutARequestItDoes) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        { const StopSignals signals; }
        std::raise(SIGTERM);
        _exit(75);
      },
      testing::KilledBySignal(SIGTERM), "");
}

}  // namespace
}  // namespace birkhoff
