// The sequences of a global batch that a rank computes.
#pragma once

#include <cstdint>

#include "cluster/base/interval.h"

namespace birkhoff {

// The sequences that rank `rank` of `size` computes, of a global batch of `global_batch` sequences.
// With virtual shards (configs.Invariant, `num_shards` > 0) they are whole shards; shard s is part
// s of the batch.
inline Interval rank_share(std::int64_t global_batch, std::int64_t num_shards, int rank, int size) {
  if (num_shards == 0) return partition(global_batch, rank, size);
  const Interval shards = partition(num_shards, rank, size);
  return {global_batch * shards.begin / num_shards, global_batch * shards.end / num_shards};
}

}  // namespace birkhoff
