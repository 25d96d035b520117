#include "tests/cluster/base/fiber.h"

#include <numeric>
#include <stdexcept>
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

void FiberBlock::run(unsigned num_threads, bool leave,
                     const std::function<void(std::vector<unsigned>& order)>& reorder,
                     const std::function<void()>& body) {
  warps_.assign((num_threads + kWarp - 1) / kWarp, {});
  all_ = {.expected = num_threads};
  while (threads_.size() < num_threads) threads_.push_back(std::make_unique<Thread>());
  for (unsigned t = 0; t < num_threads; ++t) {
    ++warps_[t / kWarp].expected;
    threads_[t]->waits_for = nullptr;
    threads_[t]->fiber.start([this, leave, &body] {
      body();
      if (leave) leave_barriers();
    });
  }
  std::vector<unsigned> order(num_threads);
  std::iota(order.begin(), order.end(), 0u);
  unsigned ended = 0;
  for (bool progress = true; progress;) {
    progress = false;
    reorder(order);
    for (const unsigned t : order) {
      Thread& thread = *threads_[t];
      if (thread.fiber.done() || thread.waits()) continue;
      progress = true;
      thread_ = t;
      thread.fiber.resume();
      if (thread.fiber.done()) ++ended;
    }
  }
  if (ended < num_threads) throw std::runtime_error("threads wait for others that never come");
}

void FiberBlock::leave_barriers() {
  for (Barrier* barrier : {&of_warp(), &of_block()}) {
    --barrier->expected;
    if (barrier->expected > 0 && barrier->arrived == barrier->expected) release(*barrier);
  }
}

}  // namespace birkhoff::test
