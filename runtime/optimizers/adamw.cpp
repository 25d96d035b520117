#include "runtime/optimizers/adamw.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>

#include "configs/schema/config.pb.h"
#include "runtime/optimizers/adamw_formula.h"
#include "runtime/optimizers/gpu_adamw.h"

namespace birkhoff {
namespace {

// Fewest elements per thread: with fewer, starting a thread costs more than it saves.
constexpr std::int64_t kGrain = 16384;

// Compiled with -O3 -fno-math-errno: the loop becomes vector instructions.
template <typename T>
void update(T* __restrict p, const T* __restrict g, T* __restrict m, T* __restrict v,
            std::int64_t n, T keep, const AdamWFactors<T>& f) {
  const AdamWFactors<T> factors = f;
  for (std::int64_t i = 0; i < n; ++i) adamw_update(p[i], g[i], m[i], v[i], keep, factors);
}

// One flag per 64 elements of a rank's part of a bucket: does weight decay apply to them? Slots
// begin at multiples of 64, so no 64 elements belong to two parameters.
at::Tensor decay_flags(const GradBucket& bucket) {
  constexpr std::int64_t kGroup = GradBucket::kAlignment;
  const at::Tensor flags = at::zeros({bucket.elements() / kGroup}, at::kByte);
  for (const GradBucket::Slot& slot : bucket.slots) {
    if (!slot.decay) continue;
    flags.narrow(0, slot.offset / kGroup, (slot.elements + kGroup - 1) / kGroup).fill_(1);
  }
  return flags.narrow(0, bucket.owned.begin / kGroup, bucket.owned.size() / kGroup).contiguous();
}

}  // namespace

AdamW::AdamW(const configs::AdamW& config, GradBuckets& buckets)
    : beta1_(config.beta1()),
      beta2_(config.beta2()),
      epsilon_(config.epsilon()),
      weight_decay_(config.weight_decay()),
      buckets_(buckets),
      num_updates_(
          at::zeros({1}, at::TensorOptions(at::kDouble).device(buckets.group().device()))) {
  for (const auto& bucket : buckets_.buckets()) {
    moments_.push_back({at::zeros_like(bucket.own_values), at::zeros_like(bucket.own_values), {}});
    if (bucket.values.is_cuda()) {
      moments_.back().decayed_G = decay_flags(bucket).to(bucket.values.device());
    }
  }
}

void AdamW::step(const StepScalars& scalars) {
  if (num_updates_.is_cuda()) {
    step_on_gpu(scalars);
  } else {
    step_on_host(scalars);
  }
}

void AdamW::step_on_gpu(const StepScalars& scalars) {
  num_updates_.add_(scalars.on_device().select(0, StepScalars::kApply));
  for (std::size_t b = 0; b < moments_.size(); ++b) {
    const GradBucket& bucket = buckets_.buckets()[b];
    FusedAdamWBucket part{.values_n = bucket.own_values,
                          .gradients_n = bucket.own_gradients,
                          .m_n = moments_[b].m,
                          .v_n = moments_[b].v,
                          .decayed_G = moments_[b].decayed_G};
    fused_adamw(part, {beta1_, beta2_, epsilon_, weight_decay_}, scalars.on_device(), num_updates_);
  }
}

void AdamW::step_on_host(const StepScalars& scalars) {
  if (scalars.get(StepScalars::kApply) == 0) return;  // skips the whole step
  const double t = num_updates_.mutable_data_ptr<double>()[0] += 1;
  const double rate = scalars.get(StepScalars::kLearningRate);
  for (std::size_t b = 0; b < moments_.size(); ++b) {
    const GradBucket& bucket = buckets_.buckets()[b];
    const Interval owned = bucket.owned;
    AT_DISPATCH_FLOATING_TYPES(bucket.values.scalar_type(), "adamw", [&] {
      const AdamWFactors<scalar_t> factors = adamw_factors<scalar_t>(
          scalars.get(StepScalars::kGradientScale), beta1_, beta2_, epsilon_, rate, t);
      const scalar_t keep_decayed = static_cast<scalar_t>(1 - rate * weight_decay_);
      scalar_t* p = bucket.own_values.mutable_data_ptr<scalar_t>();
      const scalar_t* g = bucket.own_gradients.const_data_ptr<scalar_t>();
      scalar_t* m = moments_[b].m.mutable_data_ptr<scalar_t>();
      scalar_t* v = moments_[b].v.mutable_data_ptr<scalar_t>();
      at::parallel_for(owned.begin, owned.end, kGrain, [&](std::int64_t begin, std::int64_t end) {
        for (const GradBucket::Slot& slot : bucket.slots) {
          const std::int64_t first = std::max(begin, slot.offset);
          const std::int64_t last = std::min(end, slot.offset + slot.elements);
          if (first >= last) continue;
          const std::int64_t i = first - owned.begin;
          update<scalar_t>(p + i, g + i, m + i, v + i, last - first,
                           slot.decay ? keep_decayed : scalar_t{1}, factors);
        }
      });
    });
  }
}

std::vector<TensorPart> AdamW::state() {
  std::vector<TensorPart> parts;
  for (std::size_t b = 0; b < moments_.size(); ++b) {
    const GradBucket& bucket = buckets_.buckets()[b];
    for (const GradBucket::Slot& slot : bucket.slots) {
      for (const auto& [prefix, moment] :
           {std::pair("adamw.m/", &moments_[b].m), std::pair("adamw.v/", &moments_[b].v)}) {
        for (TensorPart& part : owned_parts(buckets_, bucket, slot, prefix + slot.name,
                                            StateKind::kOptimizer, *moment)) {
          parts.push_back(std::move(part));
        }
      }
    }
  }
  parts.push_back(whole_part("adamw.num_updates", StateKind::kOptimizer, num_updates_, 0));
  return parts;
}

}  // namespace birkhoff
