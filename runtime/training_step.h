// One training step on a batch: forward, backward, reduce, clip, update. Used by Trainer and
// `birkhoff bench step`.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cluster/base/activity.h"
#include "cluster/base/collectives/process_group.h"
#include "data/batch/batch.h"
#include "data/batch/partition.h"
#include "models/model.h"
#include "runtime/gradients/grad_buckets.h"
#include "runtime/gradients/step_sums.h"
#include "runtime/optimizers/optimizer.h"
#include "runtime/optimizers/step_scalars.h"
#include "runtime/reporting/reports.h"
#include "runtime/step_graph.h"

namespace birkhoff::configs {
class Train;
}

namespace birkhoff {

// Results of a step's gradient computation. Sums are over the data-parallel ranks, decisions over
// the world; the same on each rank.
struct GradientSums {
  bool has_targets = true;  // a batch without any teaches nothing
  double count = 1;         // counted targets, at least 1
  double weight = 1;        // the sum of their weights, or 1 without targets
  double nats = 0;          // their loss
  double norm = 0;          // of the mean gradient, before clipping
  FigureValues figures{};   // of the model

  std::int64_t num_tokens = 0;  // read, without padding
  bool stop_requested = false;  // by any rank
  bool abandoned = false;       // a rank has not computed all of its part: the sums are worthless
  // Ranks of the world whose losses, or whose gradients' norms, are not finite.
  std::vector<int> losses_not_finite{}, norms_not_finite{};
  bool losses_finite() const { return losses_not_finite.empty(); }
  bool finite() const { return losses_finite() && norms_not_finite.empty(); }
  // Whether update() changes anything.
  bool applies() const { return finite() && has_targets; }
  // Names the ranks whose losses are not finite, or says that the norm is not.
  std::string describe_non_finite() const;
};

// Called within a step, unless empty.
struct StepHooks {
  std::function<void()> launched{};      // all passes are launched, before finish_reducing()
  std::function<bool()> asks_to_stop{};  // called next: does this rank want to stop?
  // Called first, and before each micro-batch (not if train.cuda_graph replays it): does this rank
  // give up the step? It then takes part only in the reductions, and so do the ranks whose passes
  // need it.
  std::function<bool()> gives_up{};
  std::function<void()> forward_done{};  // after each micro-batch's pass, as backward_done
  std::function<void()> backward_done{};
};

class TrainingStep {
 public:
  // The caller owns everything, and it must outlive the step. `group`: the data-parallel ranks, the
  // same as the buckets'. `world`: all ranks that must skip and stop together, on hosts. activity:
  // null: no watchdog. pass_group: the ranks, on hosts, that communicate within a forward or
  // backward pass: those that hold the parts of the model, or all ranks if
  // GradBuckets::passes_are_collective(). Null: none.
  TrainingStep(const configs::Train& train, Model& model, ProcessGroup& group, ProcessGroup& world,
               GradBuckets& buckets, Optimizer& optimizer, Activity* activity = nullptr,
               ProcessGroup* pass_group = nullptr);

  // Computes the gradients of this rank's batch as step `step`, times `loss_scale`, and leaves
  // their sum over ranks in the buckets. Changes no parameter. With train.cuda_graph the passes are
  // recorded once and replayed: batches must be at the same address each time. Collective over the
  // world.
  GradientSums sum_gradients(const Batch& batch, std::int64_t step, double loss_scale,
                             const StepHooks& hooks = {});

  // What the passes of this rank's batch leave for the next one (LossSums::past_BNMC), in the order
  // of its rows; undefined: nothing.
  at::Tensor next_past() const;

  // The first part of sum_gradients(): all passes, and the reductions that they start. Collective
  // over the ranks that communicate within the passes.
  void launch_passes(const Batch& batch, std::int64_t step, double loss_scale,
                     const StepHooks& hooks);
  // The second part: afterwards gradients and step sums are added up over the ranks. Returns the
  // gradient norm's chunk sums (grad_norm.h). Does not wait for the device. Collective over the
  // group.
  at::Tensor reduce();

  // If `sums` apply, clips the gradients in the buckets and updates the parameters and the model's
  // statistics. epoch: of the step's first sample, for the learning rate, which it returns.
  // Collective over the group.
  double update(const GradientSums& sums, std::int64_t step, std::int64_t epoch, double loss_scale);

  // How many backward passes a step has on the rank of `num_ranks` that has most.
  static std::int64_t num_passes(const configs::Train& train, std::int64_t global_batch,
                                 int num_ranks);

  // What the ranks of the world add up to decide together: a row of votes for each.
  static at::Tensor blank_votes(int num_ranks);
  static constexpr char kVotesName[] = "decisions of the step";

 private:
  enum Vote : std::int64_t { kStop, kAbandoned, kLossNotFinite, kNormNotFinite, kNumVotes };

  void compute_gradients();  // of *batch_
  // A pass over rows of *batch_. sums_row: of the step's sums; -1: the pass does not count.
  void run_pass(Interval rows, bool last, std::int64_t sums_row);
  // Collective over `pass_group`.
  bool gives_up();
  // Fills in what all ranks decide together, from this rank's part. Collective over the world.
  void decide(bool losses_finite, bool stop_requested, GradientSums& sums) const;

  const configs::Train& train_;
  Model& model_;
  ProcessGroup& group_;
  ProcessGroup& world_;
  GradBuckets& buckets_;
  Optimizer& optimizer_;
  Activity* activity_;
  ProcessGroup* const pass_group_;
  // Of the running call; members because a recorded part must not capture them.
  const Batch* batch_ = nullptr;
  const StepHooks* hooks_ = nullptr;
  bool abandoned_ = false;
  std::vector<at::Tensor> next_past_BNMC;  // of the passes
  StepScalars scalars_;
  StepSums step_sums_;
  at::Tensor chunk_sums_;  // of squares, for the gradient norm
  // The parts that train.cuda_graph records. The host makes its decisions between them.
  StepGraph gradients_graph_, norm_graph_, update_graph_;
};

}  // namespace birkhoff
