#include "data/loader/sample_source.h"

#include "cluster/base/error.h"

namespace birkhoff {

Batch read_samples(SampleSource& source, std::int64_t begin, std::int64_t end) {
  require(0 <= begin && begin <= end && end <= source.num_samples(), "samples outside the split");
  Batch batch = source.make_batch(end - begin);
  std::vector<SampleSource::Row> rows;
  for (std::int64_t sample = begin; sample < end; ++sample) {
    rows.push_back({.sample = sample, .epoch = 0, .id = sample});
  }
  source.fill(batch, rows);
  return batch;
}

}  // namespace birkhoff
