// Training, step by step. Read Trainer::step() and what it calls in trainer.cpp from top to bottom:
// batch, forward, backward, reduce, clip, update, report.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "cluster/base/activity.h"
#include "cluster/base/group.h"
#include "data/batch/batch.h"
#include "data/batch/share.h"
#include "models/model.h"
#include "runtime/agreement.h"
#include "runtime/device_feed.h"
#include "runtime/evaluator.h"
#include "runtime/grad_buckets.h"
#include "runtime/metrics.h"
#include "runtime/optimizer.h"
#include "runtime/run_checkpoints.h"
#include "runtime/signals.h"
#include "runtime/step_graph.h"
#include "runtime/step_scalars.h"

namespace birkhoff::configs {
class Config;
}

namespace birkhoff {

enum class Outcome {
  kDone,     // all steps are done and saved
  kRequeue,  // a signal came: the state is saved, or is none to go on from; the same command goes
             // on from the last checkpoint (exit code 75)
  kRestore,  // ranks disagree and the policy says restore: go on from the last checkpoint
};

// What a trainer works with. Everything is owned by the caller and outlives the trainer.
struct TrainerParts {
  const configs::Config& config;
  Model& model;
  DeviceFeed& feed;  // this rank's part of each global batch; may be empty
  Group& group;      // the data-parallel ranks, the same group as the buckets'
  GradBuckets& buckets;
  Optimizer& optimizer;
  const StopSignals& signals;
  Evaluator* evaluator = nullptr;         // null: nothing to evaluate on
  RunCheckpoints* checkpoints = nullptr;  // null: nothing is saved
  Metrics* metrics = nullptr;             // rank 0's; null: nothing is reported
  StepLog* step_log = nullptr;            // for ranks without metrics; null: they report nothing
  Agreement* agreement = nullptr;         // null: ranks are not compared
  Activity* activity = nullptr;           // null: nobody watches
};

class Trainer {
 public:
  explicit Trainer(TrainerParts parts);

  // Trains from `state` to the configured number of steps, or until a signal. Collective over the
  // group. Error(kNumerical), on all ranks, when values are not finite and the policy says stop,
  // when training ends with such values, or when ranks do not agree and the policy says stop.
  Outcome run(TrainState& state);

 private:
  // What the gradients of a step come to over all ranks; the same on each.
  struct GradientSums {
    at::Tensor tail;   // fp64 on the host: see trainer.cpp
    double count = 1;  // counted targets, at least 1
    double norm = 0;   // of the mean gradient, before clipping
    bool losses_finite = false;
    bool finite() const;
  };

  struct StepResult {
    StepReport report;
    std::int64_t tokens = 0;      // counted targets of the step
    bool applied = false;         // or skipped
    bool stop_requested = false;  // on any rank
  };

  // Rows of this rank's batch that are one virtual shard, or all of them, and their row of the
  // tail.
  struct ShardRows {
    Interval rows;
    std::int64_t tail_row = 0;
  };

  StepResult step(TrainState& state);
  // Those of batch_ as step `step`, left in the buckets. Changes no parameter.
  GradientSums sum_gradients(std::int64_t step, const LossScale& scale);
  // Whether gradients that are not finite are the loss scale's doing, which the next step halves.
  bool scale_overflows(const GradientSums& sums, const LossScale& scale) const;
  // Gradients and tail of this rank's batch. With train.cuda_graph it is recorded once and
  // replayed: what differs from step to step reaches it through the memory of the batch and the
  // scalars.
  void compute_gradients(const Batch& batch);
  std::vector<ShardRows> shards_of_batch(std::int64_t batch_size) const;
  void add_to_tail(std::int64_t row, const ObjectiveSums& sums);
  at::Tensor tail_sums() const;  // on the host: waits for the device
  void count_skipped(TrainState& state, const GradientSums& sums) const;
  // Which ranks' losses are not finite, or that the norm is not.
  std::string describe_non_finite(const GradientSums& sums) const;
  void evaluate(TrainState& state);
  // At the end: why the state is none to go on from; empty if it is one. Where it is to be saved
  // its gradients are tried, which no step will do.
  std::string find_divergence(const TrainState& state);
  std::string cure() const;  // of a divergence, for messages
  // The process has no more steps to do. `divergence` as find_divergence()'s.
  Outcome end(const TrainState& state, bool stop, const std::string& divergence);
  // False: they differ, and the run goes back to its last checkpoint.
  bool ranks_agree(const TrainState& state);
  void enter(Phase phase, std::int64_t step);

  TrainerParts parts_;
  std::optional<Batch> batch_;  // of the last step
  StepScalars scalars_;
  at::Tensor tail_;  // fp64 sums that travel with the gradients, on the device: see trainer.cpp
  at::Tensor block_sums_;  // of the gradient norm

  // With train.cuda_graph: what a recorded step reads, and its parts. The host decides between
  // them.
  FixedBatch fixed_batch_;
  StepGraph gradients_graph_, norm_graph_, update_graph_;
};

}  // namespace birkhoff
