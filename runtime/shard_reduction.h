// The reduction of one gradient bucket with virtual shards (configs.Invariant): each rank adds up
// the shards it has as far as the fixed tree of runtime/shard_tree.h allows, sends each slice of
// these partial sums to the slice's owner, the owner adds up the rest of the tree, and all gather
// the slices. Where the number of ranks is a power of two that divides the number of shards, a rank
// has one partial sum, and as many bytes travel as in a plain all_reduce.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cluster/base/group.h"
#include "runtime/shard_tree.h"

namespace birkhoff {

class ShardReduction {
 public:
  // gradients: 1-D, a multiple of the group's size long; the caller's, as is the group.
  // `slice_only`: this rank needs the sums of its own slice, and the slices are not gathered.
  ShardReduction(Group& group, std::int64_t num_shards, at::Tensor gradients, bool slice_only);

  // `gradients` hold this rank's next shard; they are read. Local.
  void add_shard();
  // Sends the partial sums. Collective.
  void start(const std::string& name);
  // Waits for the others' sums, adds up this rank's slice and, unless slice_only, sends it.
  // Collective.
  void combine(const std::string& name);
  // Waits: `gradients`, or this rank's slice of them, hold the sum over all shards, the same bits
  // for any number of ranks. The next add_shard() begins a new sum.
  void finish();

 private:
  // Nodes of the tree that a rank sends.
  std::vector<Interval> nodes_of_rank(int rank) const;

  Group& group_;
  const std::int64_t num_shards_;
  at::Tensor gradients_;
  const bool slice_only_;
  ShardSum mine_;
  std::int64_t next_shard_;
  std::vector<std::int64_t> send_counts_, receive_counts_;  // elements for and from each rank
  at::Tensor sent_, received_;
  ShardSum slice_;  // all shards, of the slice that this rank owns
  std::unique_ptr<Work> work_;
};

}  // namespace birkhoff
