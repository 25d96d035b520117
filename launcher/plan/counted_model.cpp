#include "launcher/plan/counted_model.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <optional>

#include "launcher/measure/peak_memory.h"
#include "models/meta_operations.h"
#include "runtime/tasks/task.h"

namespace birkhoff {

CountedModel::CountedModel(const configs::Config& config, std::int64_t vocabulary,
                           c10::Device device)
    : config_(config),
      vocabulary_(vocabulary),
      device_(device),
      mesh_(mesh_shape(config, config.mesh().tensor()), device),
      model_(make_model(config, vocabulary, {device, &mesh_.tensor()})),
      buckets_(model_->parameters(), mesh_.data(), config.train().bucket_elements()) {}

Batch CountedModel::batch(std::int64_t sequences) const {
  configs::Config config = config_;
  config.mutable_train()->set_global_batch(static_cast<int>(sequences));
  return make_task(config)->synthetic_batch(vocabulary_, device_);
}

CountedModel::Bytes CountedModel::train(std::int64_t sequences) {
  const MetaOperations operations;
  PeakMemory memory(device_);
  const Batch on = batch(sequences);
  const NoiseKey noise{config_.train().seed(), at::zeros({1}, on.sample_ids_B.options()), 0,
                       on.sample_ids_B, on.global_size};
  Bytes bytes;
  memory.restart();
  {
    const LossSums sums = model_->loss_sums(on, noise);
    bytes.kept = static_cast<double>(memory.live_bytes());
    sums.loss.backward();
  }
  bytes.peak = static_cast<double>(memory.extra_bytes());
  return bytes;
}

double CountedModel::evaluate(std::int64_t sequences) {
  const MetaOperations operations;
  PeakMemory memory(device_);
  const Batch on = batch(sequences);
  const at::NoGradGuard no_gradients;
  memory.restart();
  model_->loss_sums(on, std::nullopt);
  return static_cast<double>(memory.extra_bytes());
}

ModelSize size_of_model(const configs::Config& config, std::int64_t vocabulary) {
  const auto model = make_model(config, vocabulary, at::kMeta);
  const double ranks = config.mesh().tensor();
  return {model->forward_flops_per_sequence() / ranks,
          static_cast<double>(model->parameters().num_elements()) / ranks};
}

}  // namespace birkhoff
