// Flat gradient buckets. Parameters and their gradients are views, at equal offsets, of a few long
// buffers, so a reduction, a norm or an optimizer step is one pass over contiguous memory and
// nothing is ever copied. Buckets are filled in reverse creation order, the order in which the
// backward pass finishes. Each bucket is reduced over the data group as soon as it and all earlier
// ones are full, while the backward pass continues (Li et al. 2020, "PyTorch Distributed", section
// 3.2.3). The order of reductions is fixed: it never depends on timing.
//
// With ZeRO (Rajbhandari et al. 2020) a rank owns one slice of each bucket. Stage 1: it gets the
// sums of only its slices and updates only those. Stage 2: each backward pass adds its sums to the
// slices, and the gradients of a bucket are freed once they are sent. Stage 3: so are the values
// (runtime/gradients/gathered_values.h). All stages have the same buckets, so they compute the same
// bits. Slices of a node's ranks are added up inside nodes and then between nodes.
//
// If a model is divided over a tensor-parallel group, parameters that every rank of it holds have
// buckets of their own, the last ones: their gradients are also added up over that group.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cluster/base/collectives/process_group.h"
#include "cluster/base/interval.h"
#include "cluster/base/tensors/parameters.h"
#include "cluster/base/tensors/tensor_memory.h"
#include "cluster/mesh.h"
#include "runtime/gradients/gathered_values.h"
#include "runtime/gradients/grad_bucket.h"
#include "runtime/gradients/shard_reduction.h"

namespace birkhoff {

class GradBuckets : private ParameterSlices {
 public:
  // Moves the parameters' values into buckets of about `bucket_elements` (a larger parameter gets
  // its own bucket) and gives the parameters gradients. With num_shards > 0 gradients are summed
  // over that many virtual shards (configs.Invariant). zero_stage: 0 (off) to 3. nodes: slices are
  // those of the ranks inside a node, and nodes hold copies; not with virtual shards. `parameters`
  // and the groups must outlive the buckets. Local.
  GradBuckets(Parameters& parameters, ProcessGroup& group, std::int64_t bucket_elements,
              std::int64_t num_shards = 0, int zero_stage = 0,
              std::optional<NodeGroups> nodes = std::nullopt);
  ~GradBuckets() override;
  GradBuckets(const GradBuckets&) = delete;
  GradBuckets& operator=(const GradBuckets&) = delete;

  std::vector<GradBucket>& buckets() { return buckets_; }
  const std::vector<GradBucket>& buckets() const { return buckets_; }
  ProcessGroup& group() const { return group_; }
  // The ranks that have the slices: the group, or those of a node.
  ProcessGroup& slice_group() const { return slice_group_; }
  // The ranks that hold the other parts of the model.
  const ModelPlacement& place() const { return place_; }
  // Rank of the group that owns an element of a bucket: each rank of slice_group() has one of as
  // many equal slices. Of ranks with the same slice, one.
  int owner(const GradBucket& bucket, std::int64_t offset) const;
  // Whether each rank updates only its own slices: ZeRO, on more than one rank.
  bool sliced() const { return stage_ > 0; }
  // Whether ranks communicate in each forward and backward pass, so that all must make as many.
  bool passes_are_collective() const { return stage_ > 1; }
  // Whether a rank keeps only its slices of the values.
  bool values_are_sliced() const { return stage_ > 2; }

  void zero_gradients();
  // With virtual shards: ends this rank's current shard and begins its next; `one_pass`: the next
  // one has only one backward pass. Local.
  void next_shard(bool one_pass);
  // Call before each backward pass of a step, and end_pass() after it. `last`: it is this rank's
  // last pass of the step: from here on a bucket is reduced as soon as it is full. With stages 2
  // and 3 and no virtual shards every pass is reduced, so the two calls and what is between them
  // are collective over the group. `discard`, for stages 2 and 3: the pass's gradients are dropped;
  // such a pass is not the last.
  void begin_pass(bool last, bool discard = false);
  void end_pass();
  // Reduces the remaining buckets (a parameter without a gradient counts as zero) and then `sums`,
  // contiguous tensors that travel with the gradients, and waits for all. Afterwards own_gradients
  // and `sums` are the sums over the group, and gradients of buckets that are not divided also over
  // the tensor axis; other gradients are undefined. Collective over the group, as are the
  // reductions that begin_pass() permits, and over the tensor axis.
  void finish_reducing(const std::vector<at::Tensor>& sums);
  // Call after own_values were updated: all ranks get all values, with stage 3 when they use them.
  // Collective over slice_group() with stages 1 and 2, else local.
  void all_gather_parameters();

 private:
  class ReadyHook;
  class MemoryHook;
  void add_buckets(const std::vector<const Parameter*>& parameters, std::int64_t bucket_elements,
                   bool divided);
  void add_bucket(const std::vector<const Parameter*>& members, bool divided);
  // Makes the tensors of a bucket of this length.
  void keep_own(GradBucket& bucket, const at::TensorOptions& options, std::int64_t length) const;
  // Copies what the rank keeps of a parameter's value into its slot.
  void copy_value(const Parameter& parameter, const GradBucket::Slot& slot,
                  const GradBucket& bucket) const;
  void free_gradients();  // of all buckets
  // Gives a tensor without memory zeros.
  void take_zeros(const at::Tensor& tensor);
  // Whether this pass is reduced on its own.
  bool reduces_each_pass() const { return stage_ > 1 && shard_reductions_.empty(); }
  void begin_use(const std::vector<int>& units) override;
  void end_use(const std::vector<int>& units) override { gathered_->end_use(units); }
  void use_in_backward(const std::vector<int>& units) override;
  void mark_ready(std::size_t bucket);
  // Launches the next buckets whose gradients are complete.
  void launch_ready();
  void launch_next();
  // Waits for the reduction of the first launched bucket that still runs, and frees its gradients.
  void retire_next();
  void finish_sums(std::size_t bucket);  // waits for own_gradients

  ProcessGroup& group_;
  Parameters& parameters_;
  const ModelPlacement place_;
  ProcessGroup& slice_group_;
  ProcessGroup* const copy_group_;  // the ranks that have the same slice; null: none
  const int stage_;                 // 0 without slices
  TensorMemory memory_;             // of values and gradients that pass
  std::vector<GradBucket> buckets_;
  std::vector<std::vector<std::size_t>> buckets_of_;  // by unit
  std::optional<GatheredValues> gathered_;            // stage 3
  std::vector<std::shared_ptr<void>> accumulators_;   // autograd nodes that hold our hooks
  std::vector<std::size_t> missing_;  // slots of each bucket whose gradient is not complete
  std::size_t num_launched_ = 0;      // the first num_launched_ buckets are being reduced
  std::size_t num_retired_ = 0;       // and of these the first num_retired_ are done
  std::vector<std::unique_ptr<Work>> running_;  // their reductions, if no virtual shards
  std::vector<at::Tensor> added_;  // what a pass adds to own_gradients, if not the first
  std::vector<ShardReduction> shard_reductions_;  // one for each bucket, if virtual shards
  std::vector<std::unique_ptr<Work>> between_;    // of running_, the sums between nodes
  bool first_pass_ = true;                        // of the step
  bool reducing_ = false, discarding_ = false;
};

}  // namespace birkhoff
