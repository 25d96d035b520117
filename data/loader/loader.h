// Batches for one rank, prepared by a background thread. The order of samples is a keyed
// permutation computed on the fly from (seed, epoch): start-up needs no index, and the position in
// the data is one number, `consumed`.
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
  // T. Sample i is tokens [iT, iT + T], shifted if shift_windows is set; the last token is only a
  // target.
  std::int64_t sequence_length = 0;
  bool restart_at_documents = false;  // also return segments_BT and positions_BT
  bool shift_windows = false;         // training: epochs after the first cut at other positions
  std::int64_t global_batch = 0;      // samples per step, over all ranks
  std::uint64_t seed = 0;
  std::int64_t shards = 0;  // virtual shards of a global batch; 0 = none
  int rank = 0, size = 1;   // in the data group: this rank gets rank_share() of each global batch
  int prefetch = 4;         // batches prepared ahead
};

// The number of whole samples in the split. If there are none: Error(kData).
std::int64_t samples_per_epoch(const Corpus& corpus, const LoaderOptions& options);

class TrainLoader {
 public:
  // Starts the thread at sample position `consumed`, counted over all epochs (a batch may span two
  // epochs). If the split is too short: Error(kData).
  TrainLoader(const Corpus& corpus, LoaderOptions options, std::int64_t consumed);
  ~TrainLoader();
  // Returns this rank's part of the next global batch (it may be empty if there are more ranks than
  // samples). Its memory is reused once no copy or view of its tensors is left. Rethrows errors of
  // the thread.
  Batch next();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// The windows of a split in order, without overlap, for evaluation. The last window is padded (mask
// 0).
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
