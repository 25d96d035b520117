// Rank 0 of a mesh whose other ranks are imitated: its part of the model, its state, and its
// training steps on synthetic tokens. On LibTorch's meta device, which has shapes and no memory,
// nothing is computed: MetaOperations must exist. Local.
#pragma once

#include <cstdint>
#include <memory>

#include "configs/schema/config.pb.h"
#include "launcher/measure/imitated_group.h"
#include "launcher/measure/step_schedule.h"
#include "models/model.h"
#include "runtime/gradients/grad_buckets.h"
#include "runtime/optimizers/optimizer.h"
#include "runtime/training_step.h"

namespace birkhoff {

class ImitatedRank {
 public:
  // recorder: told of the steps; null: none is. It must outlive the rank. Error(kConfig) as
  // make_model().
  ImitatedRank(const configs::Config& config, std::int64_t vocabulary, int num_ranks,
               at::Device device, StepRecorder* recorder = nullptr);

  Model& model() { return *model_; }
  GradBuckets& buckets() { return buckets_; }
  Optimizer& optimizer() { return *optimizer_; }
  int num_data_ranks() { return mesh_.data().size(); }

  // Takes a step. On the meta device without the update of parameters, which exchanges nothing.
  void take_step();

 private:
  const configs::Config config_;
  StepRecorder* const recorder_;
  ImitatedMesh mesh_;
  const std::unique_ptr<Model> model_;
  GradBuckets buckets_;
  const std::unique_ptr<Optimizer> optimizer_;
  TrainingStep step_;
  const Batch batch_;
};

// The schedule of rank 0's step, in seconds: the median of `rounds` steps that the device computes.
// fp16 is computed as bf16. With train.cuda_graph both passes count as the forward pass.
StepSchedule measured_schedule(configs::Config config, std::int64_t vocabulary, int num_ranks,
                               at::Device device, int rounds);

}  // namespace birkhoff
