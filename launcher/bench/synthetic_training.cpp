#include "launcher/bench/synthetic_training.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>

#include <cmath>
#include <string>

#include "cluster/base/gpu/device.h"
#include "launcher/bench/report.h"

namespace birkhoff {

ModelInputs synthetic_inputs(const configs::Config& config, std::int64_t vocabulary) {
  ModelInputs inputs{.vocabulary = vocabulary, .class_names = {}};
  if (config.task().has_classification()) {
    for (int i = 0; i < config.task().classification().classes(); ++i)
      inputs.class_names.push_back(std::to_string(i));
  }
  return inputs;
}

Batch synthetic_batch(const configs::Config& config, std::int64_t vocabulary, at::Device device) {
  const std::int64_t batch_size = config.train().global_batch();
  const std::int64_t length = config.data().sequence_length();
  const at::TensorOptions integers = at::TensorOptions(at::kLong).device(device);
  const at::Generator generator = at::detail::createCPUGenerator(config.train().seed());
  const at::Tensor tokens = at::randint(vocabulary, {batch_size, length + 1}, generator, integers);
  Batch batch;
  batch.fields[std::string(field::kInputs)] = tokens.narrow(1, 0, length);
  batch.sample_ids_B = at::arange(batch_size, integers);
  if (config.task().has_classification()) {
    batch.fields[std::string(field::kLengths)] = at::full({batch_size}, length, integers);
    batch.fields[std::string(field::kLabels)] =
        at::randint(config.task().classification().classes(), {batch_size}, generator, integers);
    return batch;
  }
  batch.fields[std::string(field::kTargets)] = tokens.narrow(1, 1, length);
  batch.fields[std::string(field::kMask)] =
      at::ones({batch_size, length}, integers.dtype(at::kByte));
  return batch;
}

namespace {

configs::Config without_graph(configs::Config config) {
  config.mutable_train()->set_cuda_graph(false);
  return config;
}

}  // namespace

SyntheticTraining::SyntheticTraining(const configs::Config& config, std::int64_t vocabulary,
                                     at::Device device)
    : config_(config),
      plain_config_(without_graph(config)),
      device_(device),
      batch_(synthetic_batch(config, vocabulary).to(device)),
      loss_scale_(loss_scale(config)),
      group_(make_single_group(device)),
      model_(make_model(config, synthetic_inputs(config, vocabulary), {*group_, *group_, *group_})),
      buckets_(model_->parameters(), *group_, config.train().bucket_elements()),
      optimizer_(make_optimizer(config.train().optimizer(), buckets_)),
      plain_(plain_config_.train(), *model_, *group_, *group_, buckets_, *optimizer_),
      recorded_(config_.train(), *model_, *group_, *group_, buckets_, *optimizer_) {}

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
  plain_.update(sums, kStep, loss_scale_);
  add_to(times.optimizer);
  return times;
}

double SyntheticTraining::step_seconds(bool recorded) {
  TrainingStep& step = recorded ? recorded_ : plain_;
  const double start = now();
  step.update(step.sum_gradients(batch_, kStep, loss_scale_), kStep, loss_scale_);
  return now() - start;
}

double SyntheticTraining::loss_scale(const configs::Config& config) {
  if (config.train().precision() != configs::Train::fp16) return 1;
  const double tokens = 1.0 * config.train().global_batch() * config.data().sequence_length();
  return std::exp2(17 - std::ceil(std::log2(tokens)));
}

double SyntheticTraining::now() const {
  synchronize(device_);
  return wall_seconds();
}

}  // namespace birkhoff
