// Flat gradient buckets. Parameters and their gradients are views, at equal offsets, of a few long
// buffers, so a reduction, a norm or an optimizer step is one pass over contiguous memory and
// nothing is ever copied. Buckets are filled in reverse creation order, the order in which the
// backward pass finishes. Each bucket is reduced over the data group as soon as it and all earlier
// ones are full, while the backward pass continues (Li et al. 2020, "PyTorch Distributed", section
// 3.2.3). The order of reductions is fixed: it never depends on timing.
//
// If a model is divided over a tensor-parallel group, parameters that every rank of it holds have
// buckets of their own, the last ones: their gradients are also added up over that group.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cluster/base/collectives/process_group.h"
#include "cluster/base/interval.h"
#include "cluster/base/tensors/parameters.h"
#include "runtime/gradients/shard_reduction.h"

namespace birkhoff {

class GradBuckets {
 public:
  // The slot of one parameter in a bucket.
  struct Slot {
    std::string name;
    bool decay = true;  // as in Parameter
    std::vector<std::int64_t> shape;
    std::int64_t offset = 0, elements = 0;  // in the bucket
    TensorPlacement placement{};            // as in Parameter
  };
  // values and gradients: 1-D, of equal length, a multiple of kAlignment * ranks; the padding
  // between slots is zero.
  struct Bucket {
    at::Tensor values, gradients;
    std::vector<Slot> slots;
    bool divided = false;  // each rank of the tensor axis has other elements
    std::int64_t elements() const { return values.size(0); }
  };
  // Slots start at multiples of this many elements: at least a cache line and the widest vector.
  static constexpr std::int64_t kAlignment = 64;

  // Moves the parameters' values into buckets of about `bucket_elements` (a larger parameter gets
  // its own bucket) and gives the parameters gradients. With num_shards > 0 gradients are summed
  // over that many virtual shards (configs.Invariant). With `zero_stage` 1 (ZeRO, Rajbhandari et
  // al. 2020) a rank gets the sums of only its own slices and updates only those;
  // all_gather_parameters() gathers the values. `parameters` and `group` must outlive the buckets.
  // Local.
  GradBuckets(Parameters& parameters, ProcessGroup& group, std::int64_t bucket_elements,
              std::int64_t num_shards = 0, int zero_stage = 0);
  ~GradBuckets();
  GradBuckets(const GradBuckets&) = delete;
  GradBuckets& operator=(const GradBuckets&) = delete;

  std::vector<Bucket>& buckets() { return buckets_; }
  const std::vector<Bucket>& buckets() const { return buckets_; }
  ProcessGroup& group() const { return group_; }
  // The ranks that hold the other parts of the model.
  const ModelPlacement& place() const { return place_; }
  // Rank of the group that owns an element of a bucket: each rank owns one of size() equal slices.
  int owner(const Bucket& bucket, std::int64_t offset) const;
  // Whether each rank updates only its own slices: ZeRO, on more than one rank.
  bool sliced() const { return sliced_; }
  // Elements of a bucket whose reduced gradients this rank has and whose values it updates: its
  // slice if sliced(), else all.
  Interval owned(const Bucket& bucket) const;

  void zero_gradients();
  // With virtual shards: ends this rank's current shard and begins its next; `one_pass`: the next
  // one has only one backward pass. Local.
  void next_shard(bool one_pass);
  // Call before the last backward pass of a step: from here on a bucket is reduced as soon as it is
  // full.
  void start_reducing();
  // Reduces the remaining buckets (a parameter without a gradient counts as zero) and then `sums`,
  // contiguous tensors that travel with the gradients, and waits for all. Afterwards the owned
  // gradients and `sums` are the sums over the group, and gradients of buckets that are not divided
  // also over the tensor axis; other gradients are undefined. Collective over the group, as are the
  // reductions that start_reducing() permits, and over the tensor axis.
  void finish_reducing(const std::vector<at::Tensor>& sums);
  // Call after the owned values were updated: all ranks get all values. Collective over the group
  // if sliced(), else local.
  void all_gather_parameters();

 private:
  class ReadyHook;
  void add_buckets(const std::vector<const Parameter*>& parameters, std::int64_t bucket_elements,
                   bool divided);
  void add_bucket(const std::vector<const Parameter*>& members, bool divided);
  void mark_ready(std::size_t bucket);
  void launch_next();

  ProcessGroup& group_;
  const ModelPlacement place_;
  std::vector<Bucket> buckets_;
  std::vector<std::shared_ptr<void>> accumulators_;  // autograd nodes that hold our hooks
  std::vector<std::size_t> missing_;  // slots of each bucket whose gradient is not complete
  std::size_t num_launched_ = 0;      // the first num_launched_ buckets are being reduced
  std::vector<std::unique_ptr<Work>> running_;    // their reductions, if no virtual shards
  std::vector<ShardReduction> shard_reductions_;  // one for each bucket, if virtual shards
  bool sliced_ = false;
  bool reducing_ = false;
};

}  // namespace birkhoff
