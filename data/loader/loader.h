// Batches for one rank, prepared by background threads. The order of samples is a keyed
// permutation computed on the fly from (seed, epoch): start-up needs no index, and the position in
// the data is one number, `consumed`. If reading takes long, a thread announces the rows of the
// next batches to the system, which reads them in the background and at the same time.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "data/batch/batch.h"
#include "data/loader/batch_plan.h"
#include "data/loader/sample_source.h"

namespace birkhoff {

struct LoaderOptions {
  BatchPlanOptions batches;
  int prefetch = 4;  // batches prepared ahead
  // Threads that read. One starts; while training waits for data, their number doubles, up to this
  // one. They share the rows of a batch.
  int max_readers = 1;
};

class TrainLoader {
 public:
  // Starts a thread at sample position `consumed`, counted over all epochs.
  TrainLoader(std::unique_ptr<SampleSource> source, const LoaderOptions& options,
              std::int64_t consumed);
  ~TrainLoader();
  // Returns this rank's part of the next global batch (it may be empty if there are more ranks than
  // samples). Its memory is reused once no copy or view of its tensors is left. Rethrows errors of
  // the threads; batches before the error are returned first.
  Batch next();
  // The same, but returns nullopt if `gives_up` returns true while it waits for the threads. After
  // that, and after an error, the destructor does not wait for them; they end once their reads
  // return.
  std::optional<Batch> next(const std::function<bool()>& gives_up);

 private:
  class Impl;
  std::shared_ptr<Impl> impl_;  // the threads have one, too
};

}  // namespace birkhoff
