// Runs a group's operations in the order they were submitted, so that all ranks keep the same
// order: on a thread of its own, which sleeps when it is idle, so that communication overlaps
// computation; or on the caller's.
#pragma once

#include <c10/util/FunctionRef.h>

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
  // Finishes the submitted operations, then ends the thread.
  ~OperationQueue();
  OperationQueue(const OperationQueue&) = delete;
  OperationQueue& operator=(const OperationQueue&) = delete;

  // The first call starts the thread. After an operation throws, all later ones fail with the same
  // exception, because the ranks no longer agree on the order.
  std::unique_ptr<Work> submit(std::function<void()> operation);
  // For a caller that waits at once: wait() runs the operation on its thread, after all that were
  // submitted. Saves two changes of thread, which take longer than a small message. This thread
  // must not submit another one before wait(). Operation: takes and returns nothing; copyable.
  template <typename Operation>
  std::unique_ptr<Work> submit_to_caller(Operation operation) {
    return std::make_unique<CallerWork<Operation>>(*this, std::move(operation));
  }
  // True while an operation is not finished.
  bool busy() const;

 private:
  struct Item {
    std::function<void()> operation;
    std::promise<void> done;
  };
  template <typename Operation>
  class CallerWork;
  void run();
  // Runs the operation unless an earlier one has failed. One thread at a time. Returns the failure
  // of either.
  std::exception_ptr execute(c10::function_ref<void()> operation);
  // Lets the next thread execute.
  void finish();
  // Runs the operation when all that were submitted are finished. Rethrows the failure.
  void run_on_caller(c10::function_ref<void()> operation);
  // Keeps an operation that failed: MPI may still write into the tensors that it holds.
  static void keep_forever(std::function<void()> operation);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> items_;
  bool executing_ = false;
  int num_callers_ = 0;  // that wait until they may execute
  bool stopping_ = false;
  std::exception_ptr failure_;  // used only by the thread that executes
  std::thread thread_;
};

template <typename Operation>
class OperationQueue::CallerWork : public Work {
 public:
  CallerWork(OperationQueue& queue, Operation operation)
      : queue_(queue), operation_(std::move(operation)) {}
  void wait() override {
    try {
      queue_.run_on_caller(operation_);
    } catch (...) {
      keep_forever(std::move(operation_));
      throw;
    }
  }

 private:
  OperationQueue& queue_;
  Operation operation_;
};

}  // namespace birkhoff
