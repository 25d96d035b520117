#include "launcher/measure/synthetic_training.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>

#include "cluster/base/error.h"
#include "cluster/base/gpu/device.h"
#include "configs/loader/check.h"
#include "launcher/measure/report.h"
#include "models/transformer/forward_record.h"
#include "runtime/tasks/task.h"

namespace birkhoff {
namespace {

configs::Config without_graph(configs::Config config) {
  config.mutable_train()->set_cuda_graph(false);
  return config;
}

}  // namespace

std::optional<std::int64_t> vocabulary_without_corpus(const configs::Config& config,
                                                      std::optional<std::int64_t> chosen) {
  const std::optional<std::int64_t> own = make_task(config)->own_vocabulary();
  if (own && chosen) {
    fail(ExitCode::kUsage, "--vocabulary {}: the model reads no tokens; leave it out", *chosen);
  }
  return own ? own : chosen;
}

std::int64_t synthetic_vocabulary(const configs::Config& config,
                                  std::optional<std::int64_t> chosen) {
  return vocabulary_without_corpus(config, chosen).value_or(256);
}

SyntheticTraining::SyntheticTraining(const configs::Config& config, std::int64_t vocabulary,
                                     at::Device device)
    : config_(config),
      plain_config_(without_graph(config)),
      device_(device),
      batch_(make_task(config)->synthetic_batch(vocabulary, at::kCPU).to(device)),
      loss_scale_(loss_scale(config)),
      mesh_(mesh_shape(config, config.mesh().tensor()), device),
      model_(make_model(config, vocabulary, {device, &mesh_.tensor()})),
      buckets_(model_->parameters(), mesh_.data(), config.train().bucket_elements()),
      optimizer_(make_optimizer(config.train().optimizer(), buckets_)),
      plain_(plain_config_.train(), *model_, mesh_.data(), mesh_.data(), buckets_, *optimizer_),
      recorded_(config_.train(), *model_, mesh_.data(), mesh_.data(), buckets_, *optimizer_) {}

bool SyntheticTraining::is_discontinuous() {
  if (chooses_points(config_.task())) return true;
  const c10::AutoGradMode no_gradients(false);
  const ForwardRecord record;
  model_->loss_sums(batch_.narrow(0, 1), std::nullopt);
  return std::ranges::any_of(record.attentions, [](const RecordedAttention& each) {
    return each.mechanism->traits().discontinuous;
  });
}

double SyntheticTraining::gradients_of_first(std::int64_t num_sequences) {
  return plain_.sum_gradients(batch_.narrow(0, num_sequences), kStep, loss_scale_).nats;
}

PartTimes SyntheticTraining::timed_parts(const std::function<void()>& after_forward) {
  PartTimes times;
  double before = now();
  const auto add_to = [&](double& part) {
    const double here = now();
    part += here - before;
    before = here;
  };
  const auto forward_done = [&] {
    add_to(times.forward);
    if (after_forward) after_forward();
  };
  const GradientSums sums =
      plain_.sum_gradients(batch_, kStep, loss_scale_,
                           {.launched = [&] { before = now(); },
                            .forward_done = forward_done,
                            .backward_done = [&] { add_to(times.backward); }});
  plain_.update(sums, kStep, /*epoch=*/0, loss_scale_);
  add_to(times.optimizer);
  return times;
}

double SyntheticTraining::step_seconds(bool recorded) {
  TrainingStep& step = recorded ? recorded_ : plain_;
  const double start = now();
  step.update(step.sum_gradients(batch_, kStep, loss_scale_), kStep, /*epoch=*/0, loss_scale_);
  return now() - start;
}

double SyntheticTraining::loss_scale(const configs::Config& config) {
  if (config.train().precision() != configs::Train::fp16) return 1;
  const double tokens =
      1.0 * config.train().global_batch() * static_cast<double>(tokens_per_sample(config));
  return std::exp2(17 - std::ceil(std::log2(tokens)));
}

double SyntheticTraining::now() const {
  synchronize(device_);
  return clock_seconds();
}

}  // namespace birkhoff
