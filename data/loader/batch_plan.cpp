#include "data/loader/batch_plan.h"

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "cluster/base/error.h"
#include "cluster/base/random/philox.h"
#include "data/batch/partition.h"
#include "data/loader/sampler.h"

namespace birkhoff {
namespace {

// Batches of one number of samples.
class BatchesBySamples final : public BatchPlan {
 public:
  BatchesBySamples(SampleSource& source, const BatchPlanOptions& options)
      : source_(source), options_(options), per_epoch_(source.num_samples()) {}

  PlannedBatch at(std::int64_t consumed) override {
    PlannedBatch batch{.rows = {}, .size = options_.global_batch, .longest = {}};
    const Interval share =
        rank_share(options_.global_batch, options_.shards, options_.rank, options_.size);
    if (!source_.trims()) {
      batch.rows = rows_at({consumed + share.begin, consumed + share.end});
      return batch;
    }
    const std::vector<SampleSource::Row> all =
        rows_at({consumed, consumed + options_.global_batch});
    for (const auto& row : all) {
      batch.longest = longest_of(batch.longest, source_.length(row.sample));
    }
    batch.rows.assign(all.begin() + share.begin, all.begin() + share.end);
    return batch;
  }

 private:
  // The rows with these ids.
  std::vector<SampleSource::Row> rows_at(Interval ids) {
    std::vector<SampleSource::Row> rows;
    samples_.resize(static_cast<std::size_t>(ids.size()));
    for (std::int64_t id = ids.begin; id < ids.end;) {
      const std::int64_t epoch = id / per_epoch_, place = id % per_epoch_;
      if (!order_ || epoch != order_epoch_) {
        order_.emplace(options_.seed, epoch, per_epoch_);
        order_epoch_ = epoch;
      }
      const std::int64_t count = std::min(ids.end - id, per_epoch_ - place);
      order_->read(place, place + count, samples_.data());
      for (std::int64_t i = 0; i < count; ++i) {
        rows.push_back({samples_[static_cast<std::size_t>(i)], epoch, id++});
      }
    }
    return rows;
  }

  SampleSource& source_;
  const BatchPlanOptions options_;
  const std::int64_t per_epoch_;
  std::optional<Sampler> order_;
  std::int64_t order_epoch_ = 0;
  std::vector<std::int64_t> samples_;  // of a batch, in order
};

// Batch s of an epoch takes sample s of each part.
class BatchesOfLanes final : public BatchPlan {
 public:
  BatchesOfLanes(const SampleSource& source, const BatchPlanOptions& options)
      : options_(options), per_epoch_(source.num_samples()) {}

  PlannedBatch at(std::int64_t consumed) override {
    const std::int64_t batch_size = options_.global_batch;
    require(consumed % batch_size == 0, "a batch of lanes begins at a multiple of its size");
    PlannedBatch batch{.rows = {}, .size = batch_size, .longest = {}};
    const std::int64_t epoch = consumed / per_epoch_, step = consumed % per_epoch_ / batch_size;
    const Interval share = rank_share(batch_size, options_.shards, options_.rank, options_.size);
    for (std::int64_t lane = share.begin; lane < share.end; ++lane) {
      const std::int64_t sample = lane * (per_epoch_ / batch_size) + step;
      batch.rows.push_back({.sample = sample, .epoch = epoch, .id = consumed + lane});
    }
    return batch;
  }

 private:
  const BatchPlanOptions options_;
  const std::int64_t per_epoch_;
};

// Batches of at most a number of tokens.
class BatchesByTokens final : public BatchPlan {
 public:
  BatchesByTokens(SampleSource& source, const BatchPlanOptions& options)
      : source_(source),
        options_(options),
        per_epoch_(source.num_samples()),
        pools_per_epoch_((per_epoch_ + kPoolSamples - 1) / kPoolSamples) {}

  PlannedBatch at(std::int64_t consumed) override {
    const std::int64_t epoch = consumed / per_epoch_, place = consumed % per_epoch_;
    // The part of partition() that holds the place.
    const Pool& pool = pool_at(epoch, ((place + 1) * pools_per_epoch_ - 1) / per_epoch_);
    const auto found = std::ranges::lower_bound(pool.batches, place, {}, &Piece::place);
    if (found == pool.batches.end() || found->place != place) {
      fail(ExitCode::kConfig,
           "position {} of the data: no batch of train.batch_tokens = {} begins there; the run has "
           "used another value, or another corpus",
           consumed, options_.batch_tokens);
    }
    PlannedBatch batch;
    batch.size = found->size;
    batch.longest = found->longest;
    const Interval share = rank_share(found->size, /*num_shards=*/0, options_.rank, options_.size);
    for (std::int64_t i = share.begin; i < share.end; ++i) {
      const std::int64_t sample = pool.samples[static_cast<std::size_t>(found->first + i)];
      batch.rows.push_back({.sample = sample, .epoch = epoch, .id = consumed + i});
    }
    return batch;
  }

 private:
  // A batch: samples [first, first + size) of the pool, and its place in the epoch.
  struct Piece {
    std::int64_t place = 0, first = 0, size = 0;
    SampleLength longest;
  };
  struct Pool {
    std::int64_t epoch = -1, number = 0;
    std::vector<std::int64_t> samples;  // by length
    std::vector<Piece> batches;         // in their order
  };

  // Rows are announced ahead of the batch that is made, so two pools are in use.
  const Pool& pool_at(std::int64_t epoch, std::int64_t number) {
    for (const Pool& pool : pools_) {
      if (pool.epoch == epoch && pool.number == number) return pool;
    }
    std::swap(pools_[0], pools_[1]);
    pools_[1] = make_pool(epoch, number);
    return pools_[1];
  }

  Pool make_pool(std::int64_t epoch, std::int64_t number) {
    const Interval places = partition(per_epoch_, number, pools_per_epoch_);
    Pool pool{.epoch = epoch, .number = number, .samples = {}, .batches = {}};
    pool.samples.resize(static_cast<std::size_t>(places.size()));
    Sampler(options_.seed, epoch, per_epoch_).read(places.begin, places.end, pool.samples.data());
    std::unordered_map<std::int64_t, SampleLength> lengths;
    for (const std::int64_t sample : pool.samples) lengths[sample] = source_.length(sample);
    // The longer sequence determines how many samples a batch has. Among equals, similar other
    // sequences come together: 6 % of Multi30k's batches is then padding.
    std::ranges::stable_sort(pool.samples, {}, [&](std::int64_t sample) {
      const SampleLength& length = lengths.at(sample);
      return std::pair(length.longest(), length.source + length.target);
    });
    std::vector<Piece>& batches = pool.batches;
    for (std::int64_t i = 0; i < places.size(); ++i) {
      const std::int64_t longest = lengths.at(pool.samples[static_cast<std::size_t>(i)]).longest();
      if (batches.empty() || (batches.back().size + 1) * longest > options_.batch_tokens) {
        batches.push_back({.place = 0, .first = i, .size = 0, .longest = {}});
      }
      ++batches.back().size;
    }
    if (batches.size() > 1) {  // the last one may be small
      Piece &before = *(batches.end() - 2), &last = batches.back();
      const std::int64_t fits = options_.batch_tokens / lengths.at(pool.samples.back()).longest();
      const std::int64_t moved = std::min(fits, (before.size + last.size) / 2) - last.size;
      if (moved > 0) {
        before.size -= moved;
        last.first -= moved;
        last.size += moved;
      }
    }
    for (Piece& batch : batches) {
      for (std::int64_t i = batch.first; i < batch.first + batch.size; ++i) {
        const std::int64_t sample = pool.samples[static_cast<std::size_t>(i)];
        batch.longest = longest_of(batch.longest, lengths.at(sample));
      }
    }
    shuffle(pool, places.begin);
    return pool;
  }

  // Orders the batches by keyed numbers.
  void shuffle(Pool& pool, std::int64_t place) const {
    // Layers 0 and 1 are those of data/loader/sampler.h.
    const std::uint64_t key = noise_key(options_.seed, static_cast<std::uint64_t>(pool.epoch),
                                        2 + pool.number, NoisePurpose::kSampleOrder);
    const auto number_of = [key](const Piece& batch) {
      const auto words = philox(key, 0, static_cast<std::uint64_t>(batch.first));
      return std::tuple(words[0], words[1], batch.first);
    };
    std::ranges::sort(pool.batches, {}, number_of);
    for (Piece& batch : pool.batches) {
      batch.place = place;
      place += batch.size;
    }
  }

  SampleSource& source_;
  const BatchPlanOptions options_;
  const std::int64_t per_epoch_, pools_per_epoch_;
  std::array<Pool, 2> pools_;
};

}  // namespace

std::unique_ptr<BatchPlan> make_batch_plan(SampleSource& source, const BatchPlanOptions& options) {
  require(options.size >= 1 && options.rank >= 0 && options.rank < options.size,
          "ranks of a batch plan");
  if (options.lanes) {
    require(options.batch_tokens == 0 && source.num_samples() % options.global_batch == 0,
            "lanes of equal length");
    return std::make_unique<BatchesOfLanes>(source, options);
  }
  if (options.batch_tokens == 0) {
    require(options.global_batch >= 1, "samples of a batch");
    return std::make_unique<BatchesBySamples>(source, options);
  }
  require(source.lengths_vary() && options.shards == 0, "batches of a number of tokens");
  return std::make_unique<BatchesByTokens>(source, options);
}

}  // namespace birkhoff
