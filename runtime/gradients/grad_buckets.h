// Flat gradient buckets: parameters and their gradients are views, at equal offsets, of a few long
// buffers, so that a reduction, a norm or an optimizer step is one pass over contiguous memory and
// nothing is ever copied. Buckets are filled in reverse creation order, the order in which the
// backward pass finishes, and each is reduced over the data group as soon as it and all before it
// are full, while the backward pass goes on (Li et al. 2020, "PyTorch Distributed", section 3.2.3).
// The order of reductions is fixed: it never depends on timing.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cluster/base/collectives/group.h"
#include "cluster/base/tensors/parameters.h"
#include "data/batch/share.h"
#include "runtime/gradients/shard_reduction.h"

namespace birkhoff {

class GradBuckets {
 public:
  // One parameter's place in a bucket.
  struct Slot {
    std::string name;
    bool decay = true;  // as in Parameter
    std::vector<std::int64_t> shape;
    std::int64_t offset = 0, elements = 0;  // in the bucket
  };
  // values and gradients: 1-D, equal length, a multiple of kAlignment * ranks; padding between
  // slots is zero.
  struct Bucket {
    at::Tensor values, gradients;
    std::vector<Slot> slots;
    std::int64_t elements() const { return values.size(0); }
  };
  // Slots start at multiples of this many elements: at least a cache line and the widest vector.
  static constexpr std::int64_t kAlignment = 64;

  // Moves the parameters' values into buckets of about `bucket_elements` (a larger parameter gets a
  // bucket of its own) and gives them gradients. With num_shards > 0 gradients are summed over that
  // many virtual shards (configs.Invariant). With `zero` (ZeRO stage 1, Rajbhandari et al. 2020) a
  // rank gets the sums of its own slices only, updates those, and publish_values() gathers the
  // values. `parameters` and `group` must outlive the buckets. Local.
  GradBuckets(Parameters& parameters, Group& group, std::int64_t bucket_elements,
              std::int64_t num_shards = 0, bool zero = false);
  ~GradBuckets();
  GradBuckets(const GradBuckets&) = delete;
  GradBuckets& operator=(const GradBuckets&) = delete;

  std::vector<Bucket>& buckets() { return buckets_; }
  const std::vector<Bucket>& buckets() const { return buckets_; }
  Group& group() const { return group_; }
  // Rank of the group that owns an element of a bucket: each owns one of size() equal slices.
  int owner(const Bucket& bucket, std::int64_t offset) const;
  // Whether each rank updates its own slices only: ZeRO, on more than one rank.
  bool sliced() const { return sliced_; }
  // Elements of a bucket whose reduced gradients this rank holds and whose values it updates: its
  // slice if sliced(), else all.
  Interval held(const Bucket& bucket) const;

  // Gradients become zero.
  void zero();
  // With virtual shards: one shard's backward passes are done, and those of this rank's next shard
  // begin; `one_pass`: it has only one. Local.
  void next_shard(bool one_pass);
  // Call before the last backward pass of a step: from here on a full bucket is reduced at once.
  void start_reducing();
  // Reduces what is left (a parameter without a gradient counts as zero) and then `tail`, a
  // contiguous tensor of sums that travels with the gradients, and waits for all: the held
  // gradients and tail are the sums over the group; other gradients are undefined. Collective over
  // the group, as are the reductions that start_reducing() permits.
  void finish_reducing(at::Tensor tail);
  // Call after the held values were updated: all ranks get all values. Collective over the group if
  // sliced(), else local.
  void publish_values();

 private:
  class ReadyHook;
  void add_bucket(const std::vector<const Parameter*>& members);
  void mark_ready(std::size_t bucket);
  void launch_next();

  Group& group_;
  std::vector<Bucket> buckets_;
  std::vector<std::shared_ptr<void>> accumulators_;  // autograd nodes that hold our hooks
  std::vector<std::size_t> missing_;  // slots of each bucket whose gradient is not complete
  std::size_t num_launched_ = 0;      // buckets whose reduction has begun: the first so many
  std::vector<std::unique_ptr<Work>> running_;  // their reductions; with shards instead:
  std::vector<ShardReduction> shard_reductions_;
  bool sliced_ = false;
  bool reducing_ = false;
};

}  // namespace birkhoff
