#include "data/loader/loader.h"

#include <sched.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <vector>

#include "cluster/base/error.h"
#include "cluster/base/interval.h"
#include "cluster/base/logging/log.h"
#include "cluster/base/text/plural.h"
#include "data/loader/batch_plan.h"

namespace birkhoff {
namespace {

// If rows take longer and the thread waited in between, they were probably not in the page cache,
// although they were announced. From then on all rows are announced before they are read; if they
// are fast, announcing has made them so. Otherwise only the first are: announcing a row that is in
// the page cache costs a tenth of reading it. A thread that lost its CPU to another did not wait.
constexpr std::chrono::microseconds kSlowRow{50};
constexpr std::int64_t kRowsAhead = 512;

// How often this thread has waited for something, such as a disk.
long num_waits() {
  rusage usage{};
  getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_nvcsw;
}

// Reuses the memory of batches that their users have released. Fresh memory costs more time than
// filling it, because the system zeroes each of its pages.
class BatchPool {
 public:
  explicit BatchPool(std::size_t most) : most_(most) {}

  // Returns a batch of that size that has no other user, or else a new one from `make`.
  template <typename Make>
  Batch get(std::int64_t size, Make make) {
    for (Batch& batch : batches_) {
      if (!is_free(batch)) continue;
      if (batch.size() != size) batch = make();
      return batch;
    }
    const Batch batch = make();
    if (batches_.size() < most_) batches_.push_back(batch);
    return batch;
  }

 private:
  // Copies hold the tensor; views hold its storage, which `sharing` tensors of the batch share.
  // use_count() is a relaxed read. Dropping a reference of our own orders what follows after
  // everything that the last user did before dropping theirs.
  static bool is_free(const at::Tensor& tensor, std::size_t sharing) {
    if (tensor.use_count() > 1 || tensor.storage().use_count() > sharing) return false;
    // NOLINTBEGIN(performance-unnecessary-copy-initialization)
    { const at::Tensor dropped = tensor; }
    { const c10::Storage dropped = tensor.storage(); }
    // NOLINTEND(performance-unnecessary-copy-initialization)
    return true;
  }
  static bool is_free(const Batch& batch) {
    const auto sharing = [&](const at::Tensor& tensor) {
      return static_cast<std::size_t>(
          std::count_if(batch.fields.begin(), batch.fields.end(),
                        [&](const auto& field) { return field.second.is_alias_of(tensor); }));
    };
    return is_free(batch.sample_ids_B, 1) &&
           std::all_of(batch.fields.begin(), batch.fields.end(), [&](const auto& field) {
             return is_free(field.second, sharing(field.second));
           });
  }

  const std::size_t most_;
  std::vector<Batch> batches_;
};

}  // namespace

class TrainLoader::Impl : public std::enable_shared_from_this<TrainLoader::Impl> {
 public:
  Impl(std::unique_ptr<SampleSource> source, const LoaderOptions& options, std::int64_t consumed)
      : options_(options),
        max_readers_(options.max_readers),
        source_(std::move(source)),
        plan_(make_batch_plan(*source_, options.batches)),
        pool_(static_cast<std::size_t>(options_.prefetch) + 3),
        consumed_(consumed) {
    require(options_.prefetch >= 1 && options_.max_readers >= 1 && consumed >= 0,
            "options of the loader");
  }

  void start() {
    const std::lock_guard lock(mutex_);
    add_readers(1);
  }

  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    taken_.notify_all();
    for (std::thread& reader : readers_) {
      if (leaves_threads_) {
        reader.detach();
      } else {
        reader.join();
      }
    }
  }

  std::optional<Batch> next(const std::function<bool()>& gives_up) {
    std::unique_lock lock(mutex_);
    auto more_at = std::chrono::steady_clock::now() + kPatience;
    // Polls instead of waiting to be notified: notifying would cost the reading thread more time
    // than a row does.
    while (queue_.empty() || !queue_.front()->is_done()) {
      lock.unlock();
      if (gives_up && gives_up()) {
        leaves_threads_ = true;
        return std::nullopt;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(20));
      lock.lock();
      if (std::chrono::steady_clock::now() >= more_at) {
        read_more();
        more_at += kPatience;
      }
    }
    const std::shared_ptr<Filling> first = queue_.front();
    if (first->error) {
      leaves_threads_ = true;  // another read may hang
      std::rethrow_exception(first->error);
    }
    queue_.pop_front();
    lock.unlock();
    first->batch.num_documents = first->num_documents;
    taken_.notify_one();
    return source_->trimmed(std::move(first->batch), first->longest);
  }

 private:
  // A batch whose rows are filled, or being filled.
  struct Filling {
    Batch batch;
    std::vector<SampleSource::Row> rows;
    SampleLength longest;            // of the global batch
    std::int64_t num_taken = 0;      // rows that a thread fills or has filled
    int num_threads = 0;             // that fill rows
    std::int64_t num_documents = 0;  // Batch::num_documents of the rows that are filled
    std::exception_ptr error;

    std::int64_t num_rows() const { return static_cast<std::int64_t>(rows.size()); }
    bool is_done() const { return error || (num_taken == num_rows() && num_threads == 0); }
  };

  // Call with mutex_.
  void add_readers(int count) {
    for (int i = 0; i < count; ++i) {
      readers_.emplace_back([self = shared_from_this()] { self->run(); });
    }
  }

  // Training waits, so twice as many threads read. Call with mutex_.
  void read_more() {
    const auto now = static_cast<int>(readers_.size());
    const int more = std::min(now, max_readers_ - now);
    try {
      add_readers(more);
    } catch (const std::system_error& error) {
      max_readers_ = static_cast<int>(readers_.size());
      log_warning("the system allows no more threads for data than {}: {}", max_readers_,
                  error.what());
      return;
    }
    if (more > 0 && now >= kQuietReaders) {
      log_info("training waits for data: up to {} at a time now, of {} that data.readers allows",
               counted(now + more, "read"), options_.max_readers);
    }
  }

  void run() {
    // Does not take the CPU from training when training wakes it: announcing a batch takes 0.5 ms.
    const sched_param no_priority{};
    ::sched_setscheduler(0, SCHED_BATCH, &no_priority);
    while (const std::optional<Part> part = take()) fill(*part);
  }

  // Rows of a batch for one thread, and rows of later batches that it announces.
  struct Part {
    std::shared_ptr<Filling> of;
    Interval rows;
    std::vector<SampleSource::Row> announced;
  };

  // Whether another batch may be started. Call with mutex_.
  bool has_room() const { return queue_.size() <= static_cast<std::size_t>(options_.prefetch); }

  // Waits for rows to fill; null: the loader ends.
  std::optional<Part> take() {
    std::unique_lock lock(mutex_);
    std::shared_ptr<Filling> found;
    Part part;
    taken_.wait(lock, [&] {
      const auto open = std::ranges::find_if(
          queue_, [](const auto& each) { return each->num_taken < each->num_rows(); });
      if (open != queue_.end()) found = *open;
      return stop_ || found || (has_room() && !planning_);
    });
    if (stop_) return std::nullopt;
    if (!found) {
      found = std::make_shared<Filling>();
      found->num_threads = 1;  // it is not done
      queue_.push_back(found);
      planning_ = true;
      const bool found_slow_rows = found_slow_rows_;
      PlannedBatch planned;
      Batch batch;
      std::exception_ptr error;
      lock.unlock();  // a plan may read lengths, and next() must be able to give up meanwhile
      try {
        part.announced = rows_to_announce(found_slow_rows);
        planned = plan_->at(consumed_);
        const auto num_rows = static_cast<std::int64_t>(planned.rows.size());
        batch = pool_.get(num_rows, [&] { return source_->make_batch(num_rows); });
        batch.global_size = planned.size;
        consumed_ += planned.size;
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      planning_ = false;
      found->num_threads = 0;
      if (error) {
        stop_at(*found, error);
        return std::nullopt;
      }
      found->batch = std::move(batch);
      found->rows = std::move(planned.rows);
      found->longest = planned.longest;
      if (stop_) return std::nullopt;
    }
    const auto num_readers = static_cast<std::int64_t>(readers_.size());
    const std::int64_t begin = found->num_taken;
    const std::int64_t share = (found->num_rows() + num_readers - 1) / num_readers;
    found->num_taken = std::min(begin + share, found->num_rows());
    ++found->num_threads;
    // Threads wake each other, as long as there is work: waking all of hundreds would hold up
    // next().
    if (found->num_taken < found->num_rows() || has_room()) taken_.notify_one();
    part.of = found;
    part.rows = {begin, found->num_taken};
    return part;
  }

  // Rows of the next batches, about kRowsAhead of them in all, that were not announced yet. For the
  // thread that plans.
  std::vector<SampleSource::Row> rows_to_announce(bool found_slow_rows) {
    std::vector<SampleSource::Row> rows;
    if (source_->lengths_vary()) return rows;  // such sources announce nothing
    if (announced_ > 0 && !found_slow_rows) return rows;
    announced_ = std::max(announced_, consumed_);
    while (announced_ < consumed_ + kRowsAhead * options_.batches.size) {
      const PlannedBatch planned = plan_->at(announced_);
      rows.insert(rows.end(), planned.rows.begin(), planned.rows.end());
      announced_ += planned.size;
    }
    return rows;
  }

  void fill(const Part& part) {
    Filling& of = *part.of;
    using Clock = std::chrono::steady_clock;
    bool is_slow = false;
    std::int64_t num_documents = 0;
    try {
      if (!part.announced.empty()) source_->will_fill(part.announced);
      const auto start = Clock::now();
      const long waits = num_waits();
      if (part.rows.size() == of.num_rows()) {
        source_->fill(of.batch, of.rows);
        num_documents = of.batch.num_documents;
      } else {
        Batch rows = of.batch.narrow(part.rows.begin, part.rows.end);
        source_->fill(rows, {of.rows.begin() + part.rows.begin, of.rows.begin() + part.rows.end});
        num_documents = rows.num_documents;
      }
      is_slow = Clock::now() - start > kSlowRow * part.rows.size() && num_waits() > waits;
    } catch (...) {
      const std::lock_guard lock(mutex_);
      stop_at(of, std::current_exception());
    }
    const std::lock_guard lock(mutex_);
    --of.num_threads;
    of.num_documents = std::max(of.num_documents, num_documents);
    found_slow_rows_ |= is_slow;
  }

  // The error ends the loader: batches before this one are still valid. Call with mutex_.
  void stop_at(Filling& filling, const std::exception_ptr& error) {
    if (!filling.error) filling.error = error;
    stop_ = true;
    taken_.notify_all();
  }

  // A wait of training after which more threads read; it takes longer to start one.
  static constexpr auto kPatience = std::chrono::milliseconds(2);
  static constexpr int kQuietReaders = 4;  // a few more are nothing to tell

  bool leaves_threads_ = false;       // used only by the caller
  std::vector<std::thread> readers_;  // changed only by the caller, with mutex_
  const LoaderOptions options_;
  int max_readers_;  // used only by the caller
  const std::unique_ptr<SampleSource> source_;
  // Used by one thread at a time, the one that has set planning_.
  const std::unique_ptr<BatchPlan> plan_;
  BatchPool pool_;  // batches in the queue and held by the consumer
  std::int64_t consumed_;
  std::int64_t announced_ = 0;  // position up to which rows were announced
  // Guarded by mutex_.
  std::mutex mutex_;
  bool planning_ = false;  // a thread plans the next batch
  bool found_slow_rows_ = false;
  std::condition_variable taken_;  // a batch was taken, or stop_ was set
  std::deque<std::shared_ptr<Filling>> queue_;
  bool stop_ = false;
};

TrainLoader::TrainLoader(std::unique_ptr<SampleSource> source, const LoaderOptions& options,
                         std::int64_t consumed)
    : impl_(std::make_shared<Impl>(std::move(source), options, consumed)) {
  impl_->start();
}
TrainLoader::~TrainLoader() { impl_->stop(); }
Batch TrainLoader::next() { return *impl_->next({}); }
std::optional<Batch> TrainLoader::next(const std::function<bool()>& gives_up) {
  return impl_->next(gives_up);
}

}  // namespace birkhoff
