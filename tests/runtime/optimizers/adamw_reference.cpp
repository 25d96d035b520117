#include "tests/runtime/optimizers/adamw_reference.h"

#include <ATen/ATen.h>

namespace birkhoff::test {

void reference_adamw(FusedAdamWBucket& bucket, const AdamWConstants& constants,
                     const at::Tensor& scalars_K, const at::Tensor& num_updates_1) {
  const at::ScalarType dtype = bucket.values_n.scalar_type();
  const at::Tensor apply = scalars_K.select(0, StepScalars::kApply).ne(0);
  const at::Tensor rate = scalars_K.select(0, StepScalars::kLearningRate);
  const at::Tensor scale = scalars_K.select(0, StepScalars::kGradientScale).to(dtype);
  const at::Tensor t = num_updates_1.select(0, 0);
  const at::Tensor step_size = (rate / (1 - at::pow(constants.beta1, t))).to(dtype);
  const at::Tensor inverse_sqrt_correction2 = at::rsqrt(1 - at::pow(constants.beta2, t)).to(dtype);
  const at::Tensor decay = (1 - rate * constants.weight_decay).to(dtype);

  const at::Tensor gradients_n = bucket.gradients_n.to(dtype) * scale;
  const at::Tensor m_n = constants.beta1 * bucket.m_n + (1 - constants.beta1) * gradients_n;
  const at::Tensor v_n =
      constants.beta2 * bucket.v_n + (1 - constants.beta2) * gradients_n * gradients_n;
  const at::Tensor keep_n =
      at::where(bucket.decayed_G.ne(0), decay, decay.new_ones({})).repeat_interleave(64);
  const at::Tensor values_n =
      keep_n * bucket.values_n -
      step_size * m_n / (at::sqrt(v_n) * inverse_sqrt_correction2 + constants.epsilon);

  // A select, not a product: 0 times a non-finite gradient would be NaN.
  bucket.m_n.copy_(at::where(apply, m_n, bucket.m_n));
  bucket.v_n.copy_(at::where(apply, v_n, bucket.v_n));
  bucket.values_n.copy_(at::where(apply, values_n, bucket.values_n));
}

}  // namespace birkhoff::test
