// The samples of a split, numbered from 0. A task chooses the source; the loader reads it and adds
// order, shares and threads (data/loader/loader.h).
#pragma once

#include <cstdint>
#include <vector>

#include "cluster/base/error.h"
#include "data/batch/batch.h"

namespace birkhoff {

class SampleSource {
 public:
  // A row of a batch: a sample of an epoch, and the id that keys its noise.
  struct Row {
    std::int64_t sample = 0, epoch = 0, id = 0;
  };

  virtual ~SampleSource() = default;

  // The number of samples in an epoch, at least 1. They are numbered from 0.
  virtual std::int64_t num_samples() const = 0;
  // Allocates a batch; fill() sets its values.
  virtual Batch make_batch(std::int64_t rows) const = 0;
  // Fills each row of the batch with its sample, and sets sample_ids_B. Several threads may call it
  // at once, for different rows. Error(kData) if the corpus is damaged.
  virtual void fill(Batch& batch, const std::vector<Row>& rows) = 0;
  // Once all rows are filled: the batch without the columns that none of its rows uses, as views.
  virtual Batch trimmed(Batch batch) const { return batch; }
  // Asks the system to read in the background what a later fill() of these rows will read.
  // Several threads may call it at once.
  virtual void will_fill(const std::vector<Row>& /*rows*/) {}
};

// Samples [begin, end) of the first epoch as a batch; sample_ids are their indices.
inline Batch read_samples(SampleSource& source, std::int64_t begin, std::int64_t end) {
  require(0 <= begin && begin <= end && end <= source.num_samples(), "samples outside the split");
  Batch batch = source.make_batch(end - begin);
  std::vector<SampleSource::Row> rows;
  for (std::int64_t sample = begin; sample < end; ++sample) {
    rows.push_back({.sample = sample, .epoch = 0, .id = sample});
  }
  source.fill(batch, rows);
  return source.trimmed(batch);
}

}  // namespace birkhoff
