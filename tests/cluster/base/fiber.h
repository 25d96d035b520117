// A function with a stack of its own, for the emulations of GPU threads.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <functional>
#include <memory>

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

}  // namespace birkhoff::test
