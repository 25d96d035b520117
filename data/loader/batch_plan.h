// The samples of each global batch: a function of the position in the data. A run can resume at any
// batch, on any number of ranks, without an index.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "data/loader/sample_source.h"

namespace birkhoff {

struct BatchPlanOptions {
  std::int64_t global_batch = 0;  // samples per step, over all ranks
  // Not 0: tokens per step instead, at least those of the longest sample. Batches are of samples of
  // similar length, as many as fit: their number times the longest sequence is at most this.
  std::int64_t batch_tokens = 0;
  // The samples are cut into global_batch equal parts, and position p of each batch reads part p in
  // order.
  bool lanes = false;
  std::uint64_t seed = 0;
  std::int64_t shards = 0;  // virtual shards of a global batch; 0 = none
  int rank = 0, size = 1;   // in the data group: this rank gets rank_share() of each global batch
};

struct PlannedBatch {
  std::vector<SampleSource::Row> rows;  // this rank's; ids are positions in the data
  std::int64_t size = 0;                // samples of the global batch: the position moves by it
  SampleLength longest;                 // of the global batch, if the source trims
};

class BatchPlan {
 public:
  virtual ~BatchPlan() = default;

  // The batch at a position, which is counted in samples over all epochs. Error(kConfig) if no
  // batch begins there. Error(kData) if the corpus is damaged.
  virtual PlannedBatch at(std::int64_t consumed) = 0;
};

// `source` must outlive it.
//
// With lanes, the number of samples is a multiple of the global batch, and no batch spans two
// epochs; each part begins again with the epoch.
//
// Without batch_tokens, batches follow the order of the epoch (data/loader/sampler.h), and one may
// span two epochs. With it, that order is cut into equal pools of at most kPoolSamples. The samples
// of a pool are sorted by length and cut into batches, which come in an order keyed by (seed,
// epoch, pool). The lengths of a pool are read when its first batch is planned. Each batch has at
// least half as many samples as fit if all are as long as the longest, unless the epoch has fewer.
inline constexpr std::int64_t kPoolSamples = 1 << 14;
std::unique_ptr<BatchPlan> make_batch_plan(SampleSource& source, const BatchPlanOptions& options);

}  // namespace birkhoff
