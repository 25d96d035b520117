// Training, step by step. Read Trainer::step() in trainer.cpp from top to bottom:
// batch, forward, backward, reduce, clip, update, report.
#pragma once

#include <cstdint>
#include <functional>

#include "cluster/base/group.h"
#include "data/batch/batch.h"
#include "models/model.h"
#include "runtime/evaluator.h"
#include "runtime/grad_buckets.h"
#include "runtime/metrics.h"
#include "runtime/optimizer.h"
#include "runtime/run_checkpoints.h"
#include "runtime/signals.h"
#include "runtime/step_scalars.h"

namespace birkhoff::configs {
class Config;
}

namespace birkhoff {

enum class Outcome {
  kDone,     // all steps are done and saved
  kRequeue,  // a signal came: the state is saved, the same command goes on from there (exit code
             // 75)
};

// What a trainer works with. Everything is owned by the caller and outlives the trainer.
struct TrainerParts {
  const configs::Config& config;
  Model& model;
  std::function<Batch()> next_batch;  // this rank's part of the next global batch; may be empty
  Group& group;                       // the data-parallel ranks, the same group as the buckets'
  GradBuckets& buckets;
  Optimizer& optimizer;
  const StopSignals& signals;
  Evaluator* evaluator = nullptr;         // null: nothing to evaluate on
  RunCheckpoints* checkpoints = nullptr;  // null: nothing is saved
  Metrics* metrics = nullptr;             // rank 0's; null: nothing is told
};

class Trainer {
 public:
  explicit Trainer(TrainerParts parts);

  // Trains from `state` to the configured number of steps, or until a signal. Collective over the
  // group. Error(kNumerical), on all ranks, when values are not finite and the policy says stop.
  Outcome run(TrainState& state);

 private:
  struct StepResult {
    StepReport report;
    std::int64_t tokens = 0;      // counted targets of the step
    bool stop_requested = false;  // on any rank
  };

  StepResult step(TrainState& state);
  void add_to_tail(const ObjectiveSums& sums);
  void count_skipped(TrainState& state, double norm) const;
  void evaluate(TrainState& state);

  TrainerParts parts_;
  StepScalars scalars_;
  at::Tensor tail_;  // fp64 sums that travel with the gradients: see trainer.cpp
};

}  // namespace birkhoff
