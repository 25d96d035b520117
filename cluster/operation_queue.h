// A thread that runs a group's operations in the order they were submitted, so that communication
// overlaps computation and all ranks keep the same order. It sleeps when it is idle.
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
  // True while a submitted operation is not finished.
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
  std::exception_ptr failure_;  // used only by the thread
  std::thread thread_;
};

}  // namespace birkhoff
