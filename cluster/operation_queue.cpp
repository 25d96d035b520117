#include "cluster/operation_queue.h"

#include <sys/prctl.h>

#include <utility>
#include <vector>

namespace birkhoff {
namespace {

// By default the kernel lengthens this thread's sleeps by 50 us, but operations poll every 20 us.
void sleep_precisely() {
  thread_local const int set = ::prctl(PR_SET_TIMERSLACK, 1000 /* ns */, 0, 0, 0);
  (void)set;
}

}  // namespace

class OperationQueue::QueuedWork : public Work {
 public:
  QueuedWork(OperationQueue& queue, std::future<void> done)
      : queue_(queue), done_(std::move(done)) {}
  void wait() override {
    if (done_.wait_for(std::chrono::seconds(0)) != std::future_status::ready) {
      add_waiting(1);
      queue_.begins_to_wait_.notify_one();
      done_.wait();
      add_waiting(-1);
    }
    done_.get();
  }

 private:
  void add_waiting(int count) {
    const std::lock_guard lock(queue_.mutex_);
    queue_.add_waiting(count);
  }

  OperationQueue& queue_;
  std::future<void> done_;
};

void OperationQueue::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

std::unique_ptr<Work> OperationQueue::submit(std::function<void()> operation) {
  Item item{std::move(operation), {}};
  auto work = std::make_unique<QueuedWork>(*this, item.done.get_future());
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

void OperationQueue::sleep(std::chrono::microseconds most) {
  std::unique_lock lock(mutex_);
  if (!awaited()) {
    begins_to_wait_.wait_for(lock, most, [&] { return awaited(); });
    return;
  }
  lock.unlock();
  std::this_thread::sleep_for(most);
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

void OperationQueue::finish(bool on_caller) {
  const std::lock_guard lock(mutex_);
  executing_ = false;
  if (on_caller) add_waiting(-1);
  // To wake a thread that has nothing to do would take longer than a small message.
  if (!items_.empty() || stopping_ || num_callers_ > 0) changed_.notify_all();
}

void OperationQueue::run_on_caller(c10::function_ref<void()> operation) {
  sleep_precisely();
  {
    std::unique_lock lock(mutex_);
    add_waiting(1);
    if (executing_ || !items_.empty()) {
      begins_to_wait_.notify_one();
      const WaitTimer timer;
      ++num_callers_;
      changed_.wait(lock, [&] { return !executing_ && items_.empty(); });
      --num_callers_;
    }
    executing_ = true;
  }
  const std::exception_ptr failure = execute(operation);
  finish(/*on_caller=*/true);
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
    finish(/*on_caller=*/false);
    failure == nullptr ? item.done.set_value() : item.done.set_exception(failure);
    lock.lock();
  }
}

}  // namespace birkhoff
