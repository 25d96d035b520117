#include "cluster/operation_queue.h"

#include <sys/prctl.h>

#include <utility>

namespace birkhoff {
namespace {

class FutureWork : public Work {
 public:
  explicit FutureWork(std::future<void> done) : done_(std::move(done)) {}
  void wait() override { done_.get(); }

 private:
  std::future<void> done_;
};

}  // namespace

OperationQueue::~OperationQueue() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

std::unique_ptr<Work> OperationQueue::submit(std::function<void()> operation) {
  Item item{std::move(operation), {}};
  auto work = std::make_unique<FutureWork>(item.done.get_future());
  {
    const std::lock_guard lock(mutex_);
    items_.push_back(std::move(item));
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  }
  changed_.notify_one();
  return work;
}

bool OperationQueue::busy() const {
  const std::lock_guard lock(mutex_);
  return executing_ || !items_.empty();
}

void OperationQueue::run() {
  // By default the kernel lengthens this thread's sleeps by 50 us, but operations poll every 20 us.
  ::prctl(PR_SET_TIMERSLACK, 1000 /* ns */, 0, 0, 0);
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stopping_ || !items_.empty(); });
    if (items_.empty()) return;
    Item item = std::move(items_.front());
    items_.pop_front();
    executing_ = true;
    lock.unlock();
    if (failure_ == nullptr) {
      try {
        item.operation();
      } catch (...) {
        failure_ = std::current_exception();
        // Never freed: MPI may still write into the tensors that the operation holds.
        new std::function<void()>(std::move(item.operation));
      }
    }
    item.operation = nullptr;  // releases the tensors before the waiter continues
    lock.lock();
    executing_ = false;
    lock.unlock();
    failure_ == nullptr ? item.done.set_value() : item.done.set_exception(failure_);
    lock.lock();
  }
}

}  // namespace birkhoff
