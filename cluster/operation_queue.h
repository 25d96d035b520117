// Runs a group's operations in the order they were submitted, so that all ranks keep the same
// order: on a thread of its own, which sleeps when it is idle, so that communication overlaps
// computation; or on the caller's.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <thread>

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
  // must not submit another one before wait().
  std::unique_ptr<Work> submit_to_caller(std::function<void()> operation);
  // True while an operation is not finished.
  bool busy() const;

 private:
  struct Item {
    std::function<void()> operation;
    std::promise<void> done;
  };
  class CallerWork;
  void run();
  // Runs the operation unless an earlier one has failed. One thread at a time.
  void execute(std::function<void()>& operation);
  // Lets the next thread execute.
  void finish();
  // Runs the operation when all that were submitted are finished. Rethrows the failure.
  void run_on_caller(std::function<void()> operation);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> items_;
  bool executing_ = false;
  int num_callers_ = 0;  // that wait until they may execute
  bool stopping_ = false;
  std::exception_ptr failure_;  // used only by the thread that executes
  std::thread thread_;
};

}  // namespace birkhoff
