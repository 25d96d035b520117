// One thread that executes a group's operations in the order they were given, so that communication
// overlaps computation and every rank's order is the same. It sleeps when there is nothing to do.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <thread>

#include "cluster/base/collectives/group.h"

namespace birkhoff {

class OperationQueue {
 public:
  OperationQueue() = default;
  // Finishes what was submitted, then ends the thread.
  ~OperationQueue();
  OperationQueue(const OperationQueue&) = delete;
  OperationQueue& operator=(const OperationQueue&) = delete;

  // The thread starts at the first call. After an operation has thrown, all later ones fail with
  // its exception: ranks would no longer agree on the order.
  std::unique_ptr<Work> submit(std::function<void()> operation);
  // Operations given and not yet finished.
  bool busy() const;

 private:
  struct Item {
    std::function<void()> operation;
    std::promise<void> done;
  };
  void run();

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> items_;
  bool executing_ = false;
  bool stopping_ = false;
  std::exception_ptr failure_;  // only the thread touches it
  std::thread thread_;
};

}  // namespace birkhoff
