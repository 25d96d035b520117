#include "tests/runtime/optimizers/update_reference.h"

#include <ATen/ATen.h>

namespace birkhoff::test {
namespace {

// `decayed` for elements with weight decay, `plain` for others.
at::Tensor by_decay(const FusedBucket& bucket, const at::Tensor& decayed, double plain) {
  return at::where(bucket.decayed_G.ne(0), decayed, at::full_like(decayed, plain))
      .repeat_interleave(64);
}

// A select, not a product: 0 times a non-finite gradient would be NaN.
void apply(const at::Tensor& scalars_K, const at::Tensor& to_n, const at::Tensor& next_n) {
  const at::Tensor applies = scalars_K.select(0, StepScalars::kApply).ne(0);
  to_n.copy_(at::where(applies, next_n, to_n));
}

}  // namespace

void reference_update(FusedBucket& bucket, const AdamWRule& rule, const at::Tensor& scalars_K,
                      const at::Tensor& num_updates_1) {
  const at::ScalarType dtype = bucket.values_n.scalar_type();
  const at::Tensor rate = scalars_K.select(0, StepScalars::kLearningRate);
  const at::Tensor scale = scalars_K.select(0, StepScalars::kGradientScale).to(dtype);
  const at::Tensor t = num_updates_1.select(0, 0);
  const at::Tensor step_size = (rate / (1 - at::pow(rule.beta1, t))).to(dtype);
  const at::Tensor inverse_sqrt_correction2 = at::rsqrt(1 - at::pow(rule.beta2, t)).to(dtype);
  const at::Tensor keep = (1 - rate * rule.weight_decay).to(dtype);

  const at::Tensor &m = bucket.states_n[0], &v = bucket.states_n[1];
  const at::Tensor gradients_n = bucket.gradients_n.to(dtype) * scale;
  const at::Tensor m_n = rule.beta1 * m + (1 - rule.beta1) * gradients_n;
  const at::Tensor v_n = rule.beta2 * v + (1 - rule.beta2) * gradients_n * gradients_n;
  const at::Tensor values_n =
      by_decay(bucket, keep, 1) * bucket.values_n -
      step_size * m_n / (at::sqrt(v_n) * inverse_sqrt_correction2 + rule.epsilon);
  apply(scalars_K, m, m_n);
  apply(scalars_K, v, v_n);
  apply(scalars_K, bucket.values_n, values_n);
}

void reference_update(FusedBucket& bucket, const SgdRule& rule, const at::Tensor& scalars_K,
                      const at::Tensor&) {
  const at::ScalarType dtype = bucket.values_n.scalar_type();
  const at::Tensor rate = scalars_K.select(0, StepScalars::kLearningRate).to(dtype);
  const at::Tensor scale = scalars_K.select(0, StepScalars::kGradientScale).to(dtype);
  const at::Tensor decay = at::full({}, rule.weight_decay, rate.options());
  const at::Tensor gradients_n =
      bucket.gradients_n.to(dtype) * scale + by_decay(bucket, decay, 0) * bucket.values_n;
  const at::Tensor v_n = rule.momentum * bucket.states_n[0] + gradients_n;
  const at::Tensor change_n = rule.nesterov ? gradients_n + rule.momentum * v_n : v_n;
  const at::Tensor values_n = bucket.values_n - rate * change_n;
  apply(scalars_K, bucket.states_n[0], v_n);
  apply(scalars_K, bucket.values_n, values_n);
}

}  // namespace birkhoff::test
