#include "cluster/operation_queue.h"

#include <sys/prctl.h>

#include <utility>
#include <vector>

namespace birkhoff {
namespace {

class FutureWork : public Work {
 public:
  explicit FutureWork(std::future<void> done) : done_(std::move(done)) {}
  void wait() override { done_.get(); }

 private:
  std::future<void> done_;
};

// By default the kernel lengthens this thread's sleeps by 50 us, but operations poll every 20 us.
void sleep_precisely() {
  thread_local const int set = ::prctl(PR_SET_TIMERSLACK, 1000 /* ns */, 0, 0, 0);
  (void)set;
}

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
  changed_.notify_all();
  return work;
}

bool OperationQueue::busy() const {
  const std::lock_guard lock(mutex_);
  return executing_ || !items_.empty();
}

std::exception_ptr OperationQueue::execute(c10::function_ref<void()> operation) {
  if (failure_ == nullptr) {
    try {
      operation();
    } catch (...) {
      failure_ = std::current_exception();
    }
  }
  return failure_;
}

void OperationQueue::keep_forever(std::function<void()> operation) {
  static std::mutex mutex;
  static auto* const kept = new std::vector<std::function<void()>>();
  const std::lock_guard lock(mutex);
  kept->push_back(std::move(operation));
}

void OperationQueue::finish() {
  const std::lock_guard lock(mutex_);
  executing_ = false;
  // To wake a thread that has nothing to do would take longer than a small message.
  if (!items_.empty() || stopping_ || num_callers_ > 0) changed_.notify_all();
}

void OperationQueue::run_on_caller(c10::function_ref<void()> operation) {
  sleep_precisely();
  {
    std::unique_lock lock(mutex_);
    ++num_callers_;
    changed_.wait(lock, [&] { return !executing_ && items_.empty(); });
    --num_callers_;
    executing_ = true;
  }
  const std::exception_ptr failure = execute(operation);
  finish();
  if (failure != nullptr) std::rethrow_exception(failure);
}

void OperationQueue::run() {
  sleep_precisely();
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return !executing_ && (stopping_ || !items_.empty()); });
    if (items_.empty()) return;
    Item item = std::move(items_.front());
    items_.pop_front();
    executing_ = true;
    lock.unlock();
    const std::exception_ptr failure = execute(item.operation);
    if (failure != nullptr) keep_forever(std::move(item.operation));
    item.operation = nullptr;  // releases the tensors before the waiter continues
    finish();
    failure == nullptr ? item.done.set_value() : item.done.set_exception(failure);
    lock.lock();
  }
}

}  // namespace birkhoff
