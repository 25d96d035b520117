// Training, step by step. Read Trainer::step() and what it calls in trainer.cpp and
// training_step.cpp from top to bottom: batch, forward, backward, reduce, clip, update, report.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "cluster/base/activity.h"
#include "cluster/base/collectives/group.h"
#include "data/batch/batch.h"
#include "models/model.h"
#include "runtime/agreement.h"
#include "runtime/device_feed.h"
#include "runtime/evaluator.h"
#include "runtime/gradients/grad_buckets.h"
#include "runtime/optimizers/optimizer.h"
#include "runtime/reporting/metrics.h"
#include "runtime/run_checkpoints.h"
#include "runtime/signals.h"
#include "runtime/step_graph.h"
#include "runtime/training_step.h"

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
  struct StepResult {
    StepReport report;
    std::int64_t tokens = 0;      // counted targets of the step
    bool applied = false;         // or skipped
    bool stop_requested = false;  // on any rank
  };

  StepResult step(TrainState& state);
  // Those of batch_ as step `step`.
  GradientSums sum_gradients(std::int64_t step, const LossScale& scale);
  // Whether gradients that are not finite are the loss scale's doing, which the next step halves.
  bool scale_overflows(const GradientSums& sums, const LossScale& scale) const;
  void count_skipped(TrainState& state, const GradientSums& sums) const;
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
  FixedBatch fixed_batch_;      // with train.cuda_graph: what a recorded step reads
  TrainingStep step_;
};

}  // namespace birkhoff
