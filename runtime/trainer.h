// Training, step by step. Read Trainer::step() and the functions it calls in trainer.cpp and
// training_step.cpp from top to bottom: batch, forward, backward, reduce, clip, update, report.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "cluster/base/activity.h"
#include "cluster/base/collectives/process_group.h"
#include "cluster/base/error.h"
#include "data/batch/batch.h"
#include "models/model.h"
#include "runtime/agreement.h"
#include "runtime/carried_past.h"
#include "runtime/device_prefetcher.h"
#include "runtime/evaluator.h"
#include "runtime/gradients/grad_buckets.h"
#include "runtime/optimizers/optimizer.h"
#include "runtime/reporting/reporter.h"
#include "runtime/reporting/step_clock.h"
#include "runtime/run_checkpoints.h"
#include "runtime/step_graph.h"
#include "runtime/stopping/stop_request.h"
#include "runtime/training_step.h"

namespace birkhoff::configs {
class Config;
}

namespace birkhoff {

enum class Outcome {
  kDone,     // all steps are done and saved, or evaluate.patience ended training
  kRequeue,  // stopped on request, and saved if training can resume from the state: the same
             // command resumes from the last checkpoint (exit code 75)
  kRestore,  // ranks disagree and the policy is restore: resume from the last checkpoint
};

// The objects a trainer uses. The caller owns them, and they must outlive the trainer.
struct TrainerParts {
  const configs::Config& config;
  Model& model;
  DevicePrefetcher& feed;  // this rank's part of each global batch; may be empty
  ProcessGroup& group;     // the data-parallel ranks, the same group as the buckets'
  ProcessGroup& world;     // all ranks, on hosts
  GradBuckets& buckets;
  Optimizer& optimizer;
  StopRequest& stop;   // of this process
  Reporter& reporter;  // of this rank
  Activity& activity;  // of this rank, for the watchdog
  RunCheckpoints& checkpoints;
  std::int64_t samples_per_epoch;
  Evaluator* evaluator = nullptr;      // null: no evaluation
  Agreement* agreement = nullptr;      // null: ranks are not compared
  ProcessGroup* pass_group = nullptr;  // as for TrainingStep
  CarriedPast* past = nullptr;         // null: nothing is carried
};

class Trainer {
 public:
  explicit Trainer(TrainerParts parts);

  // Trains from `state` to the configured number of steps, or until evaluate.patience ends
  // training or a rank asks to stop. At a request to stop, the ranks abandon an evaluation, a
  // long step or a wait for data, which the resumed run repeats, and save the last completed
  // step. The same if a rank cannot read its batch; all ranks then throw its error. Collective
  // over the world. Error(kNumerical), on all ranks, if values are not finite and the policy is
  // stop, if training ends with such values, or if ranks disagree and the policy is stop.
  Outcome run(TrainState& state);

 private:
  struct StepResult {
    StepReport report;
    std::int64_t tokens = 0;      // counted targets of the step
    bool applied = false;         // false: skipped
    bool stop_requested = false;  // on any rank
    bool abandoned = false;       // the step was not completed; the state is unchanged
  };

  StepResult step(TrainState& state);
  // Sums the gradients of batch_ for step `step`. If `gives_up` returns true, it abandons the step.
  GradientSums sum_gradients(std::int64_t step, const LossScale& scale,
                             const std::function<bool()>& gives_up);
  // Whether non-finite gradients are attributed to the loss scale, which is then halved.
  bool scale_overflows(const GradientSums& sums, const LossScale& scale) const;
  void count_skipped(TrainState& state, const GradientSums& sums) const;
  // Returns false if a request to stop ended the evaluation.
  bool evaluate(TrainState& state);
  // Whether training ends with this state. All ranks have the same state, so they agree.
  bool is_last(const TrainState& state) const;
  // Whether any rank asks to stop. Collective over the world.
  bool any_asks_to_stop();
  // Tells the request how long a step and a save take.
  void note_needed_seconds(double step_ms);
  // Call only if the ranks agree.
  void begin_save(const TrainState& state);
  // At the end: why training cannot resume from the state; empty if it can. If the state is to be
  // saved, its gradients are computed as a check, because no later step will do so. With `stop`,
  // time is short, so each rank computes only one micro-batch.
  std::string find_divergence(const TrainState& state, bool stop);
  std::string cure() const;  // for a divergence; the end of messages
  // Call when this process has no more steps to do. stopped_by: why it has not done all of them;
  // empty if it has. `divergence`: from find_divergence().
  Outcome end(const TrainState& state, const std::string& stopped_by,
              const std::string& divergence);
  // The error with which a rank failed to read its batch, on all ranks. Collective over the world.
  std::optional<Error> any_unread();
  // Returns false if the ranks differ and the run must go back to its last checkpoint.
  bool ranks_agree(const TrainState& state);

  TrainerParts parts_;
  std::optional<Batch> batch_;   // the last one from the feed
  std::optional<Error> unread_;  // why this rank has no batch
  bool has_stepped_ = false;     // a step was completed, so each rank has a batch
  bool warned_of_targets_ = false;
  double longest_step_seconds_ = 0;
  StaticBatch static_batch_;  // with train.cuda_graph: the batch that a recorded step reads
  TrainingStep step_;
  StepClock clock_;
};

}  // namespace birkhoff
