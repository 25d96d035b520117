#include "data/loader/loader.h"

#include <ATen/ops/empty.h>

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
#include "cluster/base/text/plural.h"
#include "data/batch/partition.h"
#include "data/corpus/shard_reader.h"
#include "data/loader/sampler.h"

namespace birkhoff {
namespace {

// Cuts samples out of the stream and writes them to the rows of a batch.
class SampleReader {
 public:
  SampleReader(const Corpus& corpus, const LoaderOptions& options)
      : reader_(corpus, options.split, options.stream),
        restart_(options.restart_at_documents),
        has_end_mark_(corpus.manifest().tokenizer().has_end_of_document()),
        length_(options.sequence_length) {
    require(length_ >= 1, "sequence length");
  }

  std::int64_t elements() const { return reader_.elements(); }

  // Allocates a batch; fill() sets its values.
  Batch make_batch(std::int64_t rows) const {
    Batch batch;
    const auto add = [&](std::string_view name, at::ScalarType type) {
      batch.fields.emplace(name, at::empty({rows, length_}, at::TensorOptions(type)));
    };
    // Inputs and targets share one storage, so that a row's tokens are stored once. They are not
    // views of one tensor: a view would hold its base, which BatchPool would take for a user's.
    const at::Tensor tokens_BT1 = at::empty({rows, length_ + 1}, at::TensorOptions(at::kLong));
    const auto add_tokens = [&](std::string_view name, std::int64_t offset) {
      batch.fields.emplace(
          name, at::empty({0}, tokens_BT1.options())
                    .set_(tokens_BT1.storage(), offset, {rows, length_}, {length_ + 1, 1}));
    };
    add_tokens(field::kInputs, 0);
    add_tokens(field::kTargets, 1);
    add(field::kMask, at::kByte);
    if (restart_) {
      add(field::kSegments, at::kInt);
      add(field::kPositions, at::kLong);
    }
    batch.sample_ids_B = at::empty({rows}, at::TensorOptions(at::kLong));
    return batch;
  }

  struct Row {
    std::int64_t first, sample_id;  // `first`: position in the stream
  };
  // Fills all rows, each with the tokens from `first` on, and pads them after the end of the
  // stream. The mask is 0 where there is no target.
  void fill(Batch& batch, const std::vector<Row>& rows) {
    require(static_cast<std::int64_t>(rows.size()) == batch.size(), "one Row per row of the batch");
    auto* tokens = data_of<std::int64_t>(batch, field::kInputs);  // and targets
    auto* mask = data_of<std::uint8_t>(batch, field::kMask);
    auto* segments = restart_ ? data_of<std::int32_t>(batch, field::kSegments) : nullptr;
    auto* positions = restart_ ? data_of<std::int64_t>(batch, field::kPositions) : nullptr;
    auto* sample_ids = batch.sample_ids_B.mutable_data_ptr<std::int64_t>();
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const std::int64_t first = rows[i].first;
      const std::int64_t count = std::min(length_ + 1, reader_.elements() - first);
      reader_.read(first, count, tokens);
      std::fill(tokens + count, tokens + length_ + 1, 0);
      std::fill(mask, mask + (count - 1), std::uint8_t{1});
      std::fill(mask + (count - 1), mask + length_, std::uint8_t{0});
      sample_ids[i] = rows[i].sample_id;
      if (restart_) {
        fill_documents(first, count, mask, segments, positions);
        segments += length_;
        positions += length_;
      }
      tokens += length_ + 1;
      mask += length_;
    }
  }

 private:
  template <typename T>
  static T* data_of(Batch& batch, std::string_view name) {
    return batch.fields.find(name)->second.mutable_data_ptr<T>();
  }

  void fill_documents(std::int64_t first, std::int64_t count, std::uint8_t* mask,
                      std::int32_t* segments, std::int64_t* positions) {
    const std::vector<std::int64_t> ends = reader_.document_ends(first, first + count - 1);
    auto end = ends.begin();
    std::int32_t segment = 0;
    std::int64_t start = first;
    for (std::int64_t t = 0; t < length_; ++t) {
      if (end != ends.end() && *end == first + t) {
        ++segment;
        start = *end++;
      }
      segments[t] = segment;
      positions[t] = first + t - start;
      // Without an end mark, nothing in this document predicts that the next one begins.
      if (!has_end_mark_ && end != ends.end() && *end == first + t + 1) mask[t] = 0;
    }
  }

  StreamReader reader_;
  bool restart_, has_end_mark_;
  std::int64_t length_;
};

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
    { const at::Tensor dropped = tensor; }
    { const c10::Storage dropped = tensor.storage(); }
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

std::int64_t samples_per_epoch(const Corpus& corpus, const LoaderOptions& options) {
  const std::int64_t tokens = corpus.stream(options.split, options.stream).elements();
  const std::int64_t samples = (tokens - 1) / options.sequence_length;
  if (samples < 1) {
    fail(ExitCode::kData,
         "{}: split '{}' has {}, too few for one sample of {} and its last target; lower "
         "data.sequence_length or prepare more text",
         corpus.folder().string(), options.split, counted(tokens, "token"),
         options.sequence_length);
  }
  return samples;
}

class TrainLoader::Impl {
 public:
  Impl(const Corpus& corpus, LoaderOptions options, std::int64_t consumed)
      : options_(std::move(options)),
        samples_(corpus, options_),
        pool_(static_cast<std::size_t>(options_.prefetch) + 3),
        consumed_(consumed) {
    require(options_.global_batch >= 1 && options_.size >= 1 && options_.rank >= 0 &&
                options_.rank < options_.size && options_.prefetch >= 1 && consumed >= 0,
            "options of the loader");
    per_epoch_ = samples_per_epoch(corpus, options_);
    thread_ = std::thread([this] { run(); });
  }

  ~Impl() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    taken_.notify_one();
    thread_.join();
  }

  Batch next() {
    std::unique_lock lock(mutex_);
    // Polls instead of waiting to be notified: notifying would cost the reading thread more time
    // than a row does.
    while (queue_.empty() && error_ == nullptr) {
      lock.unlock();
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

  Batch make_next() {
    const Interval share =
        rank_share(options_.global_batch, options_.shards, options_.rank, options_.size);
    Batch batch = pool_.get([&] { return samples_.make_batch(share.size()); });
    const std::int64_t last_first = samples_.elements() - options_.sequence_length - 1;
    rows_.clear();
    places_.resize(static_cast<std::size_t>(share.size()));
    for (std::int64_t sample_id = consumed_ + share.begin; sample_id < consumed_ + share.end;) {
      const std::int64_t epoch = sample_id / per_epoch_, place = sample_id % per_epoch_;
      if (!order_ || epoch != order_epoch_) {
        order_.emplace(options_.seed, epoch, per_epoch_);
        order_epoch_ = epoch;
        shift_ = options_.shift_windows
                     ? epoch_shift(options_.seed, epoch, options_.sequence_length)
                     : 0;
      }
      const std::int64_t count = std::min(consumed_ + share.end - sample_id, per_epoch_ - place);
      order_->read(place, place + count, places_.data());
      for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t first =
            places_[static_cast<std::size_t>(i)] * options_.sequence_length + shift_;
        // If the shifted last sample would pass the end of the stream, it starts earlier and shares
        // tokens with its neighbour.
        rows_.push_back({std::min(first, last_first), sample_id++});
      }
    }
    samples_.fill(batch, rows_);
    consumed_ += options_.global_batch;
    return batch;
  }

  const LoaderOptions options_;
  // Used only by the thread.
  SampleReader samples_;
  BatchPool pool_;  // batches in the queue, being filled, and held by the consumer
  std::int64_t consumed_;
  std::int64_t per_epoch_ = 0;
  std::optional<Sampler> order_;
  std::int64_t order_epoch_ = 0;
  std::int64_t shift_ = 0;               // of that epoch, in tokens
  std::vector<SampleReader::Row> rows_;  // of the batch being filled
  std::vector<std::int64_t> places_;     // positions of its samples in the stream, in samples
  // Shared; guarded by mutex_.
  std::mutex mutex_;
  std::condition_variable taken_;  // a batch was taken, or stop_ was set
  std::deque<Batch> queue_;
  std::exception_ptr error_;
  bool stop_ = false;
  std::thread thread_;
};

TrainLoader::TrainLoader(const Corpus& corpus, LoaderOptions options, std::int64_t consumed)
    : impl_(std::make_unique<Impl>(corpus, std::move(options), consumed)) {}
TrainLoader::~TrainLoader() = default;
Batch TrainLoader::next() { return impl_->next(); }

class EvalReader::Impl {
 public:
  Impl(const Corpus& corpus, const LoaderOptions& options)
      : samples_(corpus, options), length_(options.sequence_length) {
    if (samples_.elements() < 2) {
      fail(ExitCode::kData, "{}: split '{}' has {}, too few to predict one; prepare more text",
           corpus.folder().string(), options.split, counted(samples_.elements(), "token"));
    }
  }

  std::int64_t num_windows() const { return (samples_.elements() - 1 + length_ - 1) / length_; }

  Batch read(std::int64_t begin, std::int64_t end) {
    require(0 <= begin && begin <= end && end <= num_windows(), "windows outside the split");
    Batch batch = samples_.make_batch(end - begin);
    std::vector<SampleReader::Row> rows;
    for (std::int64_t window = begin; window < end; ++window) {
      rows.push_back({window * length_, window});
    }
    samples_.fill(batch, rows);
    return batch;
  }

 private:
  SampleReader samples_;
  std::int64_t length_;
};

EvalReader::EvalReader(const Corpus& corpus, LoaderOptions options)
    : impl_(std::make_unique<Impl>(corpus, options)) {}
EvalReader::~EvalReader() = default;
std::int64_t EvalReader::num_windows() const { return impl_->num_windows(); }
Batch EvalReader::read(std::int64_t begin, std::int64_t end) { return impl_->read(begin, end); }

}  // namespace birkhoff
