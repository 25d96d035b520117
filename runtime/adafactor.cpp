#include "runtime/adafactor.h"

#include <ATen/ATen.h>

#include <cmath>

#include "configs/config.pb.h"

namespace birkhoff {
namespace {

// 0-dim: root mean square of all elements.
at::Tensor rms(const at::Tensor& x) { return at::sqrt(at::mean(at::square(x))); }

}  // namespace

Adafactor::Adafactor(const configs::Adafactor& config, GradBuckets& buckets)
    : decay_exponent_(config.decay_exponent()),
      clip_update_(config.clip_update()),
      epsilon1_(config.epsilon1()),
      epsilon2_(config.epsilon2()),
      scale_by_parameter_(config.scale_by_parameter()),
      num_updates_(at::zeros({1}, at::kDouble)) {
  for (const auto& bucket : buckets.buckets()) {
    for (const auto& slot : bucket.slots) {
      Entry entry;
      entry.name = slot.name;
      entry.owner = buckets.owner(bucket, slot.offset);
      entry.value = bucket.values.narrow(0, slot.offset, slot.elements).view(slot.shape);
      entry.gradient = bucket.gradients.narrow(0, slot.offset, slot.elements).view(slot.shape);
      if (slot.shape.size() >= 2) {
        entry.rows = at::zeros(entry.value.select(-1, 0).sizes(), entry.value.options());
        entry.columns = at::zeros(entry.value.select(-2, 0).sizes(), entry.value.options());
      } else {
        entry.full = at::zeros_like(entry.value);
      }
      entries_.push_back(std::move(entry));
    }
  }
}

void Adafactor::step(const StepScalars& scalars) {
  if (scalars.get(StepScalars::kApply) == 0) return;  // the select of a whole step
  const double t = num_updates_.mutable_data_ptr<double>()[0] += 1;
  const double beta = 1 - std::pow(t, -decay_exponent_);
  for (Entry& entry : entries_) update(entry, scalars, beta);
}

void Adafactor::update(Entry& entry, const StepScalars& scalars, double beta) const {
  const at::Tensor gradient = entry.gradient * scalars.at(StepScalars::kGradientScale);
  const at::Tensor square = at::square(gradient).add_(epsilon1_);
  at::Tensor change;
  if (entry.full.defined()) {
    entry.full.mul_(beta).add_(square, 1 - beta);
    change = gradient * at::rsqrt(entry.full);
  } else {
    entry.rows.mul_(beta).add_(square.mean(-1), 1 - beta);
    entry.columns.mul_(beta).add_(square.mean(-2), 1 - beta);
    const at::Tensor relative_rows = entry.rows / entry.rows.mean(-1, /*keepdim=*/true);
    change =
        gradient * at::rsqrt(relative_rows).unsqueeze(-1) * at::rsqrt(entry.columns).unsqueeze(-2);
  }
  change.div_(at::clamp_min(rms(change) / clip_update_, 1.0));
  at::Tensor rate = scalars.at(StepScalars::kLearningRate);
  if (scale_by_parameter_) rate = rate * at::clamp_min(rms(entry.value), epsilon2_);
  entry.value.sub_(change.mul_(rate));
}

std::vector<NamedShard> Adafactor::state() {
  std::vector<NamedShard> shards;
  const auto add = [&](const char* prefix, const Entry& entry, const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    shards.push_back(whole_shard(prefix + entry.name, StateKind::kOptimizer, tensor, entry.owner));
  };
  for (const Entry& entry : entries_) {
    add("adafactor.rows/", entry, entry.rows);
    add("adafactor.columns/", entry, entry.columns);
    add("adafactor.full/", entry, entry.full);
  }
  shards.push_back(whole_shard("adafactor.num_updates", StateKind::kOptimizer, num_updates_, 0));
  return shards;
}

}  // namespace birkhoff
