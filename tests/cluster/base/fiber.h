// Functions with stacks of their own, and the threads of a GPU as such functions: the common part
// of both emulations, emulated_gpu.h and tests/emulated_cuda.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

// swapcontext() makes a system call for the signal mask at each switch. Sanitizers know it, and
// nothing else.
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define BIRKHOFF_FAST_FIBERS 1
#endif

namespace birkhoff::test {

class Fiber {
 public:
  explicit Fiber(std::size_t stack_bytes)
      : stack_bytes_(stack_bytes / 16 * 16), stack_(new std::byte[stack_bytes_]) {}

  // The next resume() begins body(). An earlier body must have ended.
  void start(std::function<void()> body);
  // Runs the body until it calls yield() or ends.
  void resume();
  // Called by the body: returns to resume().
  void yield();
  bool done() const { return done_; }

 private:
  static void run();

  const std::size_t stack_bytes_;
  const std::unique_ptr<std::byte[]> stack_;  // aligned to 16 bytes
  std::function<void()> body_;
  bool done_ = true;
#ifdef BIRKHOFF_FAST_FIBERS
  void *own_ = nullptr, *caller_ = nullptr;  // stack pointers of what does not run
#else
  ucontext_t own_{}, caller_{};
#endif
};

// The threads of a block as fibers, which wait for each other at barriers.
class FiberBlock {
 public:
  static constexpr unsigned kWarp = 32;

  // Threads that wait until `expected` of them are there.
  struct Barrier {
    unsigned expected = 0, arrived = 0, phase = 0;
  };

  // Runs body() in each thread until all have ended. In each round the threads that do not wait run
  // one after another, in the order that reorder(order) has made of the last one. With `leave`, a
  // thread that has ended is waited for no more. Throws std::runtime_error if threads wait for
  // others that never come.
  void run(unsigned num_threads, bool leave,
           const std::function<void(std::vector<unsigned>& order)>& reorder,
           const std::function<void()>& body);

  // ---- Called by the running thread.

  unsigned thread() const { return thread_; }
  Barrier& of_warp() { return warps_[thread_ / kWarp]; }
  Barrier& of_block() { return all_; }
  // The last thread to arrive calls work().
  template <typename Work>
  void wait(Barrier& barrier, Work work) {
    if (++barrier.arrived == barrier.expected) {
      work();
      release(barrier);
      return;
    }
    Thread& own = *threads_[thread_];
    own.waits_for = &barrier;
    own.phase = barrier.phase;
    own.fiber.yield();
  }
  void wait(Barrier& barrier) {
    wait(barrier, [] {});
  }

 private:
  struct Thread {
    Fiber fiber{128 * 1024};
    const Barrier* waits_for = nullptr;  // for the end of `phase`
    unsigned phase = 0;

    bool waits() const { return waits_for != nullptr && waits_for->phase == phase; }
  };

  static void release(Barrier& barrier) {
    barrier.arrived = 0;
    ++barrier.phase;
  }
  void leave_barriers();

  std::vector<std::unique_ptr<Thread>> threads_;
  std::vector<Barrier> warps_;
  Barrier all_;
  unsigned thread_ = 0;  // that runs
};

}  // namespace birkhoff::test
