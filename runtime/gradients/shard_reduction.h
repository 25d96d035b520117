// The reduction of one gradient bucket with virtual shards (configs.Invariant): each rank adds up
// the shards it has as far as the fixed tree of runtime/gradients/shard_tree.h allows, sends each
// slice of these partial sums to the slice's owner, the owner adds up the rest of the tree, and all
// gather the slices. Where the number of ranks is a power of two that divides the number of shards,
// a rank has one partial sum, and as many bytes travel as in a plain all_reduce.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cluster/base/collectives/group.h"
#include "runtime/gradients/shard_tree.h"

namespace birkhoff {

class ShardReduction {
 public:
  // gradients: 1-D, a multiple of the group's size long; the caller's, as is the group.
  // `slice_only`: this rank needs the sums of its own slice, and the slices are not gathered.
  ShardReduction(Group& group, std::int64_t num_shards, at::Tensor gradients, bool slice_only);

  // Before each of this rank's shards but the first: `gradients` hold the one before, and the next
  // one's can be added to them. That shard's are computed in one pass and the tree adds it to the
  // one before (`one_pass`): they stay as they are. Otherwise they are put away and become zero.
  // Local.
  void next_shard(bool one_pass);
  // `gradients` hold the last shard: sends the partial sums. Collective.
  void start(const std::string& name);
  // Waits for the others' sums, adds up this rank's slice and, unless slice_only, sends it.
  // Collective.
  void combine(const std::string& name);
  // Waits: `gradients`, or this rank's slice of them, hold the sum over all shards, the same bits
  // for any number of ranks. The next start() or next_shard() begins a new sum.
  void finish();

 private:
  Interval shards_of_rank(int rank) const { return part_of(num_shards_, rank, group_.size()); }
  void hold_first_shard();
  // Nodes of the tree that a rank sends.
  std::vector<Interval> nodes_of_rank(int rank) const;

  Group& group_;
  const std::int64_t num_shards_;
  at::Tensor gradients_;
  const bool slice_only_;
  Interval in_gradients_;  // shards whose sum `gradients` hold: a node of the tree
  ShardSum mine_;          // this rank's shards before
  std::vector<std::int64_t> send_counts_, receive_counts_;  // elements for and from each rank
  at::Tensor sent_, received_;
  ShardSum slice_;  // all shards, of the slice that this rank owns
  std::unique_ptr<Work> work_;
};

}  // namespace birkhoff
