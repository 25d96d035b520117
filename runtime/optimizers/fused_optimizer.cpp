#include "runtime/optimizers/fused_optimizer.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <array>
#include <tuple>

#include "runtime/optimizers/gpu_fused_update_params.h"

namespace birkhoff {
namespace {

// Fewest elements per thread: with fewer, starting a thread costs more than it saves.
constexpr std::int64_t kGrain = 16384;

// Compiled with -O3 -fno-math-errno: the loop becomes vector instructions.
template <typename Rule, typename T, typename... State>
void update(const typename Rule::template Factors<T>& f, bool decays, std::int64_t n,
            T* __restrict p, const T* __restrict g, State* __restrict... states) {
  const typename Rule::template Factors<T> factors = f;
  for (std::int64_t i = 0; i < n; ++i) Rule::update(factors, decays, p[i], g[i], states[i]...);
}

// One flag per kDecayGroup elements of a rank's part of a bucket: does weight decay apply to them?
at::Tensor decay_flags(const GradBucket& bucket) {
  constexpr std::int64_t kGroup = kDecayGroup;
  static_assert(GradBucket::kAlignment % kGroup == 0, "a group belongs to one parameter, one rank");
  const at::Tensor flags = at::zeros({bucket.elements() / kGroup}, at::kByte);
  for (const GradBucket::Slot& slot : bucket.slots) {
    if (!slot.decay) continue;
    flags.narrow(0, slot.offset / kGroup, (slot.elements + kGroup - 1) / kGroup).fill_(1);
  }
  return flags.narrow(0, bucket.owned.begin / kGroup, bucket.owned.size() / kGroup).contiguous();
}

}  // namespace

template <typename Rule>
FusedOptimizer<Rule>::FusedOptimizer(const Rule& rule, GradBuckets& buckets)
    : rule_(rule),
      buckets_(buckets),
      num_updates_(
          at::zeros({1}, at::TensorOptions(at::kDouble).device(buckets.group().device()))) {
  for (const auto& bucket : buckets_.buckets()) {
    FusedBucket& state = states_.emplace_back();
    for (int s = 0; s < Rule::kNumStates; ++s) {
      state.states_n.push_back(at::zeros_like(bucket.own_values));
    }
    if (bucket.values.is_cuda()) state.decayed_G = decay_flags(bucket).to(bucket.values.device());
  }
}

template <typename Rule>
void FusedOptimizer<Rule>::step(const StepScalars& scalars) {
  if (num_updates_.is_cuda()) {
    step_on_gpu(scalars);
  } else {
    step_on_host(scalars);
  }
}

template <typename Rule>
void FusedOptimizer<Rule>::step_on_gpu(const StepScalars& scalars) {
  num_updates_.add_(scalars.on_device().select(0, StepScalars::kApply));
  for (std::size_t b = 0; b < states_.size(); ++b) {
    FusedBucket part = states_[b];
    part.values_n = buckets_.buckets()[b].own_values;
    part.gradients_n = buckets_.buckets()[b].own_gradients;
    fused_update(part, rule_, scalars.on_device(), num_updates_);
  }
}

template <typename Rule>
void FusedOptimizer<Rule>::step_on_host(const StepScalars& scalars) {
  if (scalars.get(StepScalars::kApply) == 0) return;  // skips the whole step
  const double t = num_updates_.mutable_data_ptr<double>()[0] += 1;
  for (std::size_t b = 0; b < states_.size(); ++b) {
    const GradBucket& bucket = buckets_.buckets()[b];
    const Interval owned = bucket.owned;
    AT_DISPATCH_FLOATING_TYPES(bucket.values.scalar_type(), Rule::kName, [&] {
      const auto factors = rule_.template factors<scalar_t>(
          {scalars.get(StepScalars::kLearningRate), scalars.get(StepScalars::kGradientScale), t});
      scalar_t* p = bucket.own_values.mutable_data_ptr<scalar_t>();
      const scalar_t* g = bucket.own_gradients.const_data_ptr<scalar_t>();
      std::array<scalar_t*, Rule::kNumStates> states;
      for (std::size_t s = 0; s < states.size(); ++s) {
        states[s] = states_[b].states_n[s].template mutable_data_ptr<scalar_t>();
      }
      at::parallel_for(owned.begin, owned.end, kGrain, [&](std::int64_t begin, std::int64_t end) {
        for (const GradBucket::Slot& slot : bucket.slots) {
          const std::int64_t first = std::max(begin, slot.offset);
          const std::int64_t last = std::min(end, slot.offset + slot.elements);
          if (first >= last) continue;
          const std::int64_t i = first - owned.begin;
          std::apply(
              [&](auto*... of) {
                update<Rule>(factors, slot.decay, last - first, p + i, g + i, (of + i)...);
              },
              states);
        }
      });
    });
  }
}

template <typename Rule>
std::vector<TensorPart> FusedOptimizer<Rule>::state() {
  const std::string name = Rule::kName;
  std::vector<TensorPart> parts;
  for (std::size_t b = 0; b < states_.size(); ++b) {
    const GradBucket& bucket = buckets_.buckets()[b];
    for (const GradBucket::Slot& slot : bucket.slots) {
      for (std::size_t s = 0; s < Rule::kNumStates; ++s) {
        for (TensorPart& part : owned_parts(buckets_, bucket, slot,
                                            name + "." + Rule::kStateNames[s] + "/" + slot.name,
                                            StateKind::kOptimizer, states_[b].states_n[s])) {
          parts.push_back(std::move(part));
        }
      }
    }
  }
  parts.push_back(whole_part(name + ".num_updates", StateKind::kOptimizer, num_updates_, 0));
  return parts;
}

template class FusedOptimizer<AdamWRule>;
template class FusedOptimizer<SgdRule>;

}  // namespace birkhoff
