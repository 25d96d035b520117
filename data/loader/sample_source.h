// The samples of a split, numbered from 0. A task chooses the source; the loader reads it and adds
// order, shares and threads (data/loader/loader.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "cluster/base/error.h"
#include "data/batch/batch.h"

namespace birkhoff {

// Tokens of a sample: of a text (`source`), or of both sequences of a pair.
struct SampleLength {
  std::int64_t source = 0, target = 0;

  std::int64_t longest() const { return std::max(source, target); }
};
inline SampleLength longest_of(const SampleLength& a, const SampleLength& b) {
  return {std::max(a.source, b.source), std::max(a.target, b.target)};
}

class SampleSource {
 public:
  // A row of a batch: a sample of an epoch, and the id that keys its noise.
  struct Row {
    std::int64_t sample = 0, epoch = 0, id = 0;
  };

  virtual ~SampleSource() = default;

  // The number of samples in an epoch, at least 1. They are numbered from 0.
  virtual std::int64_t num_samples() const = 0;
  // Whether samples differ in length.
  virtual bool lengths_vary() const { return false; }
  // The length of a sample, if lengths vary. Error(kData) if the corpus is damaged.
  virtual SampleLength length(std::int64_t /*sample*/) { return {}; }
  // Allocates a batch; fill() sets its values.
  virtual Batch make_batch(std::int64_t rows) const = 0;
  // Fills each row of the batch with its sample, and sets sample_ids_B. Several threads may call it
  // at once, for different rows. Error(kData) if the corpus is damaged.
  virtual void fill(Batch& batch, const std::vector<Row>& rows) = 0;
  // Whether trimmed() needs the lengths of samples.
  virtual bool trims() const { return false; }
  // The batch as views, without the columns that no sample uses whose length is at most `longest`.
  // For training that is the longest of the global batch, so that a batch, its noise and its sums
  // do not depend on the number of ranks.
  virtual Batch trimmed(Batch batch, const SampleLength& /*longest*/) const { return batch; }
  // Asks the system to read in the background what a later fill() of these rows will read.
  // Several threads may call it at once.
  virtual void will_fill(const std::vector<Row>& /*rows*/) {}
};

// These samples of the first epoch as a batch; sample_ids are their indices.
inline Batch read_samples(SampleSource& source, const std::vector<std::int64_t>& samples) {
  Batch batch = source.make_batch(static_cast<std::int64_t>(samples.size()));
  std::vector<SampleSource::Row> rows;
  SampleLength longest;
  for (const std::int64_t sample : samples) {
    require(0 <= sample && sample < source.num_samples(), "samples outside the split");
    rows.push_back({.sample = sample, .epoch = 0, .id = sample});
    if (source.trims()) longest = longest_of(longest, source.length(sample));
  }
  source.fill(batch, rows);
  return source.trimmed(batch, longest);
}
// Samples [begin, end).
inline Batch read_samples(SampleSource& source, std::int64_t begin, std::int64_t end) {
  require(begin <= end, "samples in order");
  std::vector<std::int64_t> samples(static_cast<std::size_t>(end - begin));
  std::iota(samples.begin(), samples.end(), begin);
  return read_samples(source, samples);
}

}  // namespace birkhoff
