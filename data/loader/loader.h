// Batches for one rank, prepared by a thread. The order of samples is a keyed permutation computed
// on the fly from (seed, epoch): start-up needs no index, and the position in the data is one
// number, `consumed`.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "data/batch/batch.h"
#include "data/corpus/corpus.h"

namespace birkhoff {

struct LoaderOptions {
  std::string split = "train";
  std::string stream = "tokens";
  // T; sample i is tokens [iT, iT + T], shifted as asked for; the last is only a target.
  std::int64_t sequence_length = 0;
  bool restart_at_documents = false;  // also give segments_BT and positions_BT
  bool shift_windows = false;         // training: each epoch but the first cuts at other places
  std::int64_t global_batch = 0;      // samples a step, over all ranks
  std::uint64_t seed = 0;
  std::int64_t shards = 0;  // virtual shards of a global batch; 0 = none
  int rank = 0, size = 1;   // in the data group: this rank gets rank_share() of each global batch
  int prefetch = 4;         // batches prepared ahead
};

// Whole samples in the split. None: Error(kData).
std::int64_t samples_per_epoch(const Corpus& corpus, const LoaderOptions& options);

class TrainLoader {
 public:
  // Starts the thread at sample position `consumed` (over all epochs; batches straddle epochs). Too
  // short a split: Error(kData).
  TrainLoader(const Corpus& corpus, LoaderOptions options, std::int64_t consumed);
  ~TrainLoader();
  // This rank's part of the next global batch (may be empty when there are more ranks than
  // samples). Its memory is used again once no copy or view of its tensors is left. Errors of the
  // thread are rethrown here.
  Batch next();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// Windows of a split in order, not overlapping, for evaluation: the last one is padded (mask 0).
class EvalReader {
 public:
  EvalReader(const Corpus& corpus, LoaderOptions options);
  // Number of windows in the split.
  std::int64_t num_windows() const;
  // Windows [begin, end) as a batch; sample_ids are the window numbers.
  Batch read(std::int64_t begin, std::int64_t end);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;

 public:
  ~EvalReader();
};

}  // namespace birkhoff
