// A model, its optimizer, and the training steps it takes on one batch of synthetic tokens, in one
// process and without a loader. With mesh.tensor it is one rank's part of a model, and the others
// are imitated. For `bench step` and `plan`.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "configs/schema/config.pb.h"
#include "launcher/measure/imitated_group.h"
#include "models/model.h"
#include "runtime/optimizers/optimizer.h"
#include "runtime/training_step.h"

namespace birkhoff {

// The vocabulary of a configuration's model, if no corpus is needed to know it: `chosen` by
// --vocabulary, or that of a task that reads no text. Error(kUsage) if one is chosen for such a
// task.
std::optional<std::int64_t> vocabulary_without_corpus(const configs::Config& config,
                                                      std::optional<std::int64_t> chosen);
// The same for synthetic tokens: 256 ids, unless chosen.
std::int64_t synthetic_vocabulary(const configs::Config& config,
                                  std::optional<std::int64_t> chosen);

// Seconds of a step's parts, with a wait for the device after each.
struct PartTimes {
  double forward = 0, backward = 0, optimizer = 0;
};

class SyntheticTraining {
 public:
  // Error(kConfig) as make_model().
  SyntheticTraining(const configs::Config& config, std::int64_t vocabulary, at::Device device);

  Model& model() { return *model_; }
  at::Device device() const { return device_; }
  double loss_scale() const { return loss_scale_; }

  // Whether keys or points are chosen by scores. Rounded scores may choose others, which changes
  // some outputs and gradients a lot, but hardly the loss, a mean over many tokens.
  bool is_discontinuous();

  // Sums over the first sequences of the batch. Returns the loss in nats, and leaves the gradients,
  // times loss_scale(), in the parameters.
  double gradients_of_first(std::int64_t num_sequences);

  // Takes a step. after_forward: called after the forward pass of each micro-batch, unless empty.
  PartTimes timed_parts(const std::function<void()>& after_forward = {});

  // Seconds of a whole step, recorded (with train.cuda_graph) or not. The host waits only for the
  // gradient norm.
  double step_seconds(bool recorded);

 private:
  static constexpr std::int64_t kStep = 1;

  // About the value that the dynamic scale of runtime/gradients/loss_scale.h reaches; 1 if the
  // precision needs none.
  static double loss_scale(const configs::Config& config);
  // The time once the device has finished its work.
  double now() const;

  const configs::Config config_, plain_config_;
  const at::Device device_;
  const Batch batch_;
  const double loss_scale_;
  ImitatedMesh mesh_;  // of one data-parallel rank
  const std::unique_ptr<Model> model_;
  GradBuckets buckets_;
  const std::unique_ptr<Optimizer> optimizer_;
  TrainingStep plain_, recorded_;
};

}  // namespace birkhoff
