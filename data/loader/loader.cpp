#include "data/loader/loader.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "cluster/base/error.h"
#include "data/batch/partition.h"
#include "data/loader/sampler.h"

namespace birkhoff {
namespace {

// A row that takes longer was not in the page cache. Then rows are announced, before they are read,
// for the next kAnnouncedBatches batches: announcing a row that is in the page cache costs a tenth
// of reading it.
constexpr std::chrono::microseconds kSlowRow{50};
constexpr int kAnnouncedBatches = 100;
constexpr std::int64_t kRowsAhead = 512;

// Reuses the memory of batches that their users have released. Fresh memory costs more time than
// filling it, because the system zeroes each of its pages.
class BatchPool {
 public:
  explicit BatchPool(std::size_t most) : most_(most) {}

  // Returns a batch that has no other user, or else a new one from `make`.
  template <typename Make>
  Batch get(Make make) {
    for (const Batch& batch : batches_) {
      if (is_free(batch)) return batch;
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

class TrainLoader::Impl {
 public:
  Impl(std::unique_ptr<SampleSource> source, const LoaderOptions& options, std::int64_t consumed)
      : options_(options),
        source_(std::move(source)),
        per_epoch_(source_->num_samples()),
        pool_(static_cast<std::size_t>(options_.prefetch) + 3),
        consumed_(consumed) {
    require(options_.global_batch >= 1 && options_.size >= 1 && options_.rank >= 0 &&
                options_.rank < options_.size && options_.prefetch >= 1 && consumed >= 0,
            "options of the loader");
  }

  static void start(const std::shared_ptr<Impl>& impl) {
    impl->thread_ = std::thread([impl] { impl->run(); });
  }

  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    taken_.notify_one();
    if (gave_up_) {
      thread_.detach();
    } else {
      thread_.join();
    }
  }

  std::optional<Batch> next(const std::function<bool()>& gives_up) {
    std::unique_lock lock(mutex_);
    // Polls instead of waiting to be notified: notifying would cost the reading thread more time
    // than a row does.
    while (queue_.empty() && error_ == nullptr) {
      lock.unlock();
      if (gives_up && gives_up()) {
        gave_up_ = true;
        return std::nullopt;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(20));
      lock.lock();
    }
    if (queue_.empty())
      std::rethrow_exception(error_);  // only now: batches made before the error are valid
    Batch batch = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    taken_.notify_one();
    return batch;
  }

 private:
  void run() {
    try {
      while (true) {
        {
          std::unique_lock lock(mutex_);
          taken_.wait(lock, [this] {
            return stop_ || queue_.size() < static_cast<std::size_t>(options_.prefetch);
          });
          if (stop_) return;
        }
        Batch batch = make_next();
        const std::lock_guard lock(mutex_);
        queue_.push_back(std::move(batch));
      }
    } catch (...) {
      const std::lock_guard lock(mutex_);
      error_ = std::current_exception();
    }
  }

  // This rank's rows of the global batch at position `consumed`.
  const std::vector<SampleSource::Row>& rows_at(std::int64_t consumed) {
    const Interval share =
        rank_share(options_.global_batch, options_.shards, options_.rank, options_.size);
    rows_.clear();
    places_.resize(static_cast<std::size_t>(share.size()));
    for (std::int64_t id = consumed + share.begin; id < consumed + share.end;) {
      const std::int64_t epoch = id / per_epoch_, place = id % per_epoch_;
      if (!order_ || epoch != order_epoch_) {
        order_.emplace(options_.seed, epoch, per_epoch_);
        order_epoch_ = epoch;
      }
      const std::int64_t count = std::min(consumed + share.end - id, per_epoch_ - place);
      order_->read(place, place + count, places_.data());
      for (std::int64_t i = 0; i < count; ++i) {
        rows_.push_back({places_[static_cast<std::size_t>(i)], epoch, id++});
      }
    }
    return rows_;
  }

  Batch make_next() {
    using Clock = std::chrono::steady_clock;
    const auto& rows = rows_at(consumed_);
    const auto num_rows = std::ssize(rows);
    Batch batch = pool_.get([&] { return source_->make_batch(num_rows); });
    batch.global_size = options_.global_batch;
    const auto start = Clock::now();
    source_->fill(batch, rows);
    if (Clock::now() - start > kSlowRow * num_rows) batches_to_announce_ = kAnnouncedBatches;
    consumed_ += options_.global_batch;
    if (num_rows > 0 && batches_to_announce_ > 0) announce(num_rows);
    return batch;
  }

  // Names the rows of the next batches to the system, which reads them at the same time.
  void announce(std::int64_t rows_of_a_batch) {
    --batches_to_announce_;
    announced_ = std::max(announced_, consumed_);
    const std::int64_t ahead = std::max<std::int64_t>(1, kRowsAhead / rows_of_a_batch);
    for (; announced_ < consumed_ + ahead * options_.global_batch;
         announced_ += options_.global_batch) {
      source_->will_fill(rows_at(announced_));
    }
  }

  bool gave_up_ = false;  // used only by the caller
  const LoaderOptions options_;
  // Used only by the thread.
  const std::unique_ptr<SampleSource> source_;
  const std::int64_t per_epoch_;
  BatchPool pool_;  // batches in the queue, being filled, and held by the consumer
  std::int64_t consumed_;
  std::optional<Sampler> order_;
  std::int64_t order_epoch_ = 0;
  std::int64_t announced_ = 0;  // position up to which rows were announced
  int batches_to_announce_ = 0;
  std::vector<SampleSource::Row> rows_;  // of the batch being filled
  std::vector<std::int64_t> places_;     // the positions of its samples
  // Shared; guarded by mutex_.
  std::mutex mutex_;
  std::condition_variable taken_;  // a batch was taken, or stop_ was set
  std::deque<Batch> queue_;
  std::exception_ptr error_;
  bool stop_ = false;
  std::thread thread_;
};

TrainLoader::TrainLoader(std::unique_ptr<SampleSource> source, const LoaderOptions& options,
                         std::int64_t consumed)
    : impl_(std::make_shared<Impl>(std::move(source), options, consumed)) {
  Impl::start(impl_);
}
TrainLoader::~TrainLoader() { impl_->stop(); }
Batch TrainLoader::next() { return *impl_->next({}); }
std::optional<Batch> TrainLoader::next(const std::function<bool()>& gives_up) {
  return impl_->next(gives_up);
}

}  // namespace birkhoff
