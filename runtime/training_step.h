// One training step on a batch: forward, backward, reduce, clip, update. Trainer and `birkhoff
// bench step` take their steps here.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cluster/base/activity.h"
#include "cluster/base/collectives/group.h"
#include "data/batch/batch.h"
#include "data/batch/share.h"
#include "models/model.h"
#include "runtime/gradients/grad_buckets.h"
#include "runtime/optimizers/optimizer.h"
#include "runtime/optimizers/step_scalars.h"
#include "runtime/step_graph.h"

namespace birkhoff::configs {
class Train;
}

namespace birkhoff {

// What the gradients of a step come to over all ranks; the same on each.
struct GradientSums {
  double count = 1;                        // counted targets, at least 1
  double nats = 0;                         // their loss
  double norm = 0;                         // of the mean gradient, before clipping
  bool stop_requested = false;             // by any rank
  std::vector<int> ranks_not_finite = {};  // whose losses are not

  std::int64_t num_tokens = 0;  // counted targets
  bool losses_finite() const { return ranks_not_finite.empty(); }
  bool finite() const;
  // Which ranks' losses are not finite, or that the norm is not.
  std::string describe_non_finite() const;
};

// Called within a step; empty functions are not.
struct StepHooks {
  std::function<void()> launched{};      // all passes are launched, nothing is reduced
  std::function<bool()> asks_to_stop{};  // asked then: whether this rank wants to stop
  std::function<void()> forward_done{};  // after each micro-batch's pass
  std::function<void()> backward_done{};
};

class TrainingStep {
 public:
  // Everything is owned by the caller and outlives the step. `group`: the data-parallel ranks, the
  // same as the buckets'. activity: null: nobody watches.
  TrainingStep(const configs::Train& train, Model& model, Group& group, GradBuckets& buckets,
               Optimizer& optimizer, Activity* activity = nullptr);

  // Gradients of this rank's batch as step `step`, times `loss_scale`, summed over ranks and left
  // in the buckets. Changes no parameter. With train.cuda_graph the passes are recorded once and
  // replayed: batches must lie in the same memory each time. Collective over the group.
  GradientSums sum_gradients(const Batch& batch, std::int64_t step, double loss_scale,
                             const StepHooks& hooks = {});

  // Clips the gradients in the buckets and updates the parameters, where they are finite. Returns
  // the learning rate. Collective over the group.
  double update(const GradientSums& sums, std::int64_t step, double loss_scale);

 private:
  // Rows of this rank's batch that are one virtual shard, or all of them, and their row of the
  // tail.
  struct ShardRows {
    Interval rows;
    std::int64_t tail_row = 0;
  };

  void compute_gradients();  // of *batch_
  std::vector<ShardRows> shards_of_batch(std::int64_t batch_size) const;
  void add_to_tail(std::int64_t row, const ObjectiveSums& sums);
  at::Tensor tail_sums() const;  // on the host: waits for the device

  const configs::Train& train_;
  Model& model_;
  Group& group_;
  GradBuckets& buckets_;
  Optimizer& optimizer_;
  Activity* activity_;
  // Of the call that runs: a recorded part must not keep them.
  const Batch* batch_ = nullptr;
  const StepHooks* hooks_ = nullptr;
  StepScalars scalars_;
  at::Tensor tail_;        // fp64 sums that travel with the gradients, on the device
  at::Tensor block_sums_;  // of the gradient norm
  // What train.cuda_graph records. The host decides between them.
  StepGraph gradients_graph_, norm_graph_, update_graph_;
};

}  // namespace birkhoff
