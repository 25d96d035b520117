// Runs a group's operations in the order they were submitted, so that all ranks keep the same
// order: on a thread of its own, which sleeps when it is idle, so that communication overlaps
// computation; or on the caller's.
#pragma once

#include <c10/util/FunctionRef.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "cluster/base/collectives/process_group.h"

namespace birkhoff {

class OperationQueue {
 public:
  OperationQueue() = default;
  // As stop().
  ~OperationQueue() { stop(); }
  OperationQueue(const OperationQueue&) = delete;
  OperationQueue& operator=(const OperationQueue&) = delete;

  // The first call starts the thread. After an operation throws, all later ones fail with the same
  // exception, because the ranks no longer agree on the order.
  std::unique_ptr<Work> submit(std::function<void()> operation);
  // For a caller that waits at once: runs the operation on its thread, after all that were
  // submitted. Saves two changes of thread, which take longer than a small message. Operation:
  // takes and returns nothing; copyable; moved from if it throws. before: runs just before it.
  template <typename Operation>
  void run_here(
      Operation&& operation, c10::function_ref<void()> before = [] {}) {
    try {
      run_on_caller([&] {
        before();
        operation();
      });
    } catch (...) {
      keep_forever(std::move(operation));
      throw;
    }
  }
  // Finishes the submitted operations, then ends the thread. Nothing may be submitted afterwards.
  void stop();
  // True while an operation is not finished.
  bool busy() const;
  // Whether a thread waits for an operation and thus leaves its core to the thread that runs it.
  bool awaited() const { return num_waiting_ > 0; }
  // For an operation that polls: sleeps until the time is over or a thread begins to wait.
  void sleep(std::chrono::microseconds most);

 private:
  struct Item {
    std::function<void()> operation;
    std::promise<void> done;
  };
  class QueuedWork;
  void run();
  // Runs the operation unless an earlier one has failed. One thread at a time. Returns the failure
  // of either.
  std::exception_ptr execute(c10::function_ref<void()> operation);
  // Lets the next thread execute. on_caller: the operation's caller has waited for it.
  void finish(bool on_caller);
  // Counts the threads that wait for an operation, also for their own in run_here(). Called with
  // the mutex locked.
  void add_waiting(int count) {
    num_waiting_.store(num_waiting_.load(std::memory_order_relaxed) + count,
                       std::memory_order_relaxed);
  }
  // Runs the operation when all that were submitted are finished. Rethrows the failure.
  void run_on_caller(c10::function_ref<void()> operation);
  // Keeps an operation that failed: MPI may still write into the tensors that it holds.
  static void keep_forever(std::function<void()> operation);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::condition_variable begins_to_wait_;
  std::deque<Item> items_;
  bool executing_ = false;
  int num_callers_ = 0;               // that wait until they may execute
  std::atomic<int> num_waiting_ = 0;  // add_waiting(); written under the mutex
  bool stopping_ = false;
  std::exception_ptr failure_;  // used only by the thread that executes
  std::thread thread_;
};

}  // namespace birkhoff
