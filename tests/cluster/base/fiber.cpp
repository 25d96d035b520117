#include "tests/cluster/base/fiber.h"

#include <utility>

namespace birkhoff::test {
namespace {

thread_local Fiber* beginning = nullptr;  // whose body the next run() calls

#ifdef BIRKHOFF_FAST_FIBERS
extern "C" void birkhoff_switch_stack(void** from, void* to);
// Saves the registers that a callee must keep and the stack pointer, and takes the other's.
asm(R"(
.text
.globl birkhoff_switch_stack
.type birkhoff_switch_stack, @function
birkhoff_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size birkhoff_switch_stack, .-birkhoff_switch_stack
)");
#endif

}  // namespace

void Fiber::run() {
  Fiber& fiber = *beginning;
  fiber.body_();
  fiber.done_ = true;
  fiber.yield();
}

#ifdef BIRKHOFF_FAST_FIBERS

void Fiber::start(std::function<void()> body) {
  body_ = std::move(body);
  done_ = false;
  auto** top = reinterpret_cast<void**>(stack_.get() + stack_bytes_);
  *--top = nullptr;  // run() does not return
  *--top = reinterpret_cast<void*>(&Fiber::run);
  for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
  own_ = static_cast<void*>(top);
}

void Fiber::resume() {
  beginning = this;
  birkhoff_switch_stack(&caller_, own_);
}

void Fiber::yield() { birkhoff_switch_stack(&own_, caller_); }

#else

void Fiber::start(std::function<void()> body) {
  body_ = std::move(body);
  done_ = false;
  getcontext(&own_);
  own_.uc_stack.ss_sp = stack_.get();
  own_.uc_stack.ss_size = stack_bytes_;
  own_.uc_link = nullptr;
  makecontext(&own_, &Fiber::run, 0);
}

void Fiber::resume() {
  beginning = this;
  swapcontext(&caller_, &own_);
}

void Fiber::yield() { swapcontext(&own_, &caller_); }

#endif

}  // namespace birkhoff::test
