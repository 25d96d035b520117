// The reduction of one gradient bucket with virtual shards (configs.Invariant). Each rank adds up
// its shards as far as the fixed tree of runtime/gradients/shard_tree.h allows and sends each slice
// of these partial sums to the slice's owner. The owner adds up the rest of the tree, and all ranks
// gather the slices. If the number of ranks is a power of two that divides the number of shards, a
// rank has one partial sum, and as many bytes travel as in a plain all_reduce.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cluster/base/collectives/process_group.h"
#include "runtime/gradients/shard_tree.h"

namespace birkhoff {

class ShardReduction {
 public:
  // gradients: 1-D, its length a multiple of the group's size; owned by the caller, as is the
  // group. `sums`: where the sums go: all of `gradients`, or as long as a slice of them. This rank
  // then needs only the sums of its own slice, and the slices are not gathered. `gradients` may be
  // without memory outside start() and next_shard().
  ShardReduction(ProcessGroup& group, std::int64_t num_shards, at::Tensor gradients,
                 at::Tensor sums);

  // Call before each of this rank's shards except the first, when `gradients` hold the previous
  // shard. If the next shard takes one pass (`one_pass`) and the tree adds it to the previous one,
  // the gradients stay and the next shard's are added to them. Otherwise they are stored elsewhere
  // and become zero. Local.
  void next_shard(bool one_pass);
  // Call when `gradients` hold the last shard: sends the partial sums. Collective.
  void start(const std::string& name);
  // Waits for the other ranks' sums, adds up this rank's slice and, unless that is all it needs,
  // sends it. Collective.
  void combine(const std::string& name);
  // Waits until `sums` hold the sum over all shards: the same bits for any number of ranks. The
  // next start() or next_shard() begins a new sum.
  void finish();

 private:
  Interval shards_of_rank(int rank) const { return partition(num_shards_, rank, group_.size()); }
  void hold_first_shard();
  at::Tensor buffer(const std::vector<std::int64_t>& counts) const;
  // For each owner: its slice of all partial sums.
  at::Tensor slices_by_owner() const;
  // Nodes of the tree that a rank sends.
  std::vector<Interval> nodes_of_rank(int rank) const;

  ProcessGroup& group_;
  const std::int64_t num_shards_;
  at::Tensor gradients_, sums_;
  Interval in_gradients_;  // shards whose sum `gradients` hold: a node of the tree
  ShardSum mine_;          // this rank's earlier shards
  std::vector<std::int64_t> send_counts_, receive_counts_;  // elements to and from each rank
  at::Tensor sent_, received_;                              // while they travel
  ShardSum slice_;  // sum of all shards, for the slice that this rank owns
  std::unique_ptr<Work> work_;
};

}  // namespace birkhoff
