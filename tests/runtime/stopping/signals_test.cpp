// Requests to stop, while they are noted and afterwards.
#include "runtime/stopping/signals.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cluster/base/cpu.h"
#include "cluster/base/error.h"
#include "tests/runtime/deliver.h"

namespace birkhoff {
namespace {

using test::deliver;

bool blocks_all_here() {
  sigset_t mask;
  pthread_sigmask(SIG_BLOCK, nullptr, &mask);
  return sigismember(&mask, SIGTERM) == 1 && sigismember(&mask, SIGUSR1) == 1 &&
         sigismember(&mask, SIGINT) == 1 && sigismember(&mask, SIGHUP) == 1;
}

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
      deliver(signals, signal);
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
        deliver(signals, SIGINT);
        kill(getpid(), SIGINT);
        pause();
      },
      testing::KilledBySignal(SIGINT), "");
}

TEST(StopSignals, ASecondInterruptIsNotedWhereThatIsAskedFor) {
  StopSignals signals;
  deliver(signals, SIGINT);
  signals.note_second_interrupt();
  deliver(signals, SIGTERM);
  EXPECT_FALSE(signals.interrupted_twice());
  deliver(signals, SIGINT);
  EXPECT_TRUE(signals.interrupted_twice());
}

TEST(StopSignals, AnIgnoredTerminalStaysIgnored) {
  for (const int signal : {SIGHUP, SIGINT, SIGTERM, SIGUSR1}) {
    ::signal(signal, SIG_IGN);
    {
      StopSignals signals;
      signals.note_second_interrupt();
      const bool is_terminals = signal == SIGHUP || signal == SIGINT;
      if (is_terminals) {
        kill(getpid(), signal);
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        EXPECT_EQ(signals.received(), 0);
      } else {
        deliver(signals, signal);
      }
    }
    ::signal(signal, SIG_DFL);
  }
}

TEST(StopSignals, AreBlockedHereAndInThreadsThatAreStartedHere) {
  EXPECT_FALSE(blocks_all_here());
  {
    const StopSignals signals;
    EXPECT_TRUE(blocks_all_here());
    bool blocked = false;
    std::thread([&] { blocked = blocks_all_here(); }).join();
    EXPECT_TRUE(blocked);
  }
  EXPECT_FALSE(blocks_all_here());
}

// Multiplies for a second, while as many signals come as can be sent. Between the products' buffers
// lie blocks of other memory.
[[noreturn]] void multiply_under_signals() {
  const StopSignals signals;
  compute_on_cpu(2);
  const at::Tensor a = at::rand({192, 64}).t(), b = at::rand({192, 16}), product = a.mm(b);
  std::atomic<bool> ends = false;
  std::thread sender([&] {
    while (!ends) kill(getpid(), SIGUSR1);
  });
  std::mt19937 random(1);
  std::vector<std::string> blocks(64);
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  bool same = true;
  while (std::chrono::steady_clock::now() < until) {
    blocks[random() % blocks.size()] = std::string(random() % 8192, 'x');
    same = same && a.mm(b).equal(product);
    for (const std::string& block : blocks) {
      same = same && block.find_first_not_of('x') == std::string::npos;
    }
  }
  ends = true;
  sender.join();
  _exit(same ? 0 : 1);
}

// A product of oneDNN keeps the address of its buffer in the stack pointer, below which a handler's
// frame would go: seen with AVX-512, if the first matrix is transposed.
TEST(StopSignalsDeathTest, DoNoHarmToProducts) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(multiply_under_signals(), testing::ExitedWithCode(0), "");
}

TEST(StopSignalsDeathTest, AfterARequestAnotherSigtermDoesNotKill) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        {
          const StopSignals signals;
          deliver(signals, SIGTERM);
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
