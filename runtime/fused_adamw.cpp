#include "runtime/fused_adamw.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/sqrt.h>
#include <ATen/ops/where.h>

#include "cluster/base/device.h"
#include "cluster/base/error.h"
#include "runtime/fused_adamw_params.h"

namespace birkhoff {
namespace {

constexpr std::int64_t kGroup = FusedAdamWParams::kGroup;

void check_bucket(const FusedAdamWBucket& b, const at::Tensor& scalars_K,
                  const at::Tensor& num_updates_1) {
  const std::int64_t n = b.values_n.numel();
  require(n % kGroup == 0, "fused_adamw: the elements are no multiple of 64");
  for (const at::Tensor& tensor : {b.values_n, b.gradients_n, b.m_n, b.v_n}) {
    require(tensor.is_contiguous() && tensor.numel() == n,
            "fused_adamw: tensors must be contiguous and equally long");
  }
  require(b.m_n.scalar_type() == b.values_n.scalar_type() &&
              b.v_n.scalar_type() == b.values_n.scalar_type(),
          "fused_adamw: moments must be of the values' dtype");
  require(b.gradients_n.scalar_type() == b.values_n.scalar_type() ||
              b.gradients_n.scalar_type() == at::kBFloat16,
          "fused_adamw: gradients must be of the values' dtype or bf16");
  require(b.decayed_G.scalar_type() == at::kByte && b.decayed_G.is_contiguous() &&
              b.decayed_G.numel() == n / kGroup,
          "fused_adamw: decay flags must be u8, one for 64 elements");
  require(scalars_K.scalar_type() == at::kDouble && num_updates_1.scalar_type() == at::kDouble,
          "fused_adamw: scalars must be fp64");
  for (const at::Tensor& tensor :
       {b.gradients_n, b.m_n, b.v_n, b.decayed_G, scalars_K, num_updates_1}) {
    require(tensor.device() == b.values_n.device(), "fused_adamw: tensors of several devices");
  }
}

#ifdef BIRKHOFF_CUDA
void launch(FusedAdamWBucket& b, const AdamWConstants& constants, const at::Tensor& scalars_K,
            const at::Tensor& num_updates_1) {
  require(b.values_n.scalar_type() == at::kFloat, "fused_adamw: values on a GPU must be fp32");
  for (const at::Tensor& tensor : {b.values_n, b.gradients_n, b.m_n, b.v_n}) {
    require(fits_vectors(tensor, /*num_bytes=*/0), "fused_adamw: data must be aligned to 16 bytes");
  }
  const double* scalars = scalars_K.const_data_ptr<double>();
  FusedAdamWParams params{};
  params.elements = b.values_n.numel();
  params.values = b.values_n.mutable_data_ptr<float>();
  params.m = b.m_n.mutable_data_ptr<float>();
  params.v = b.v_n.mutable_data_ptr<float>();
  params.gradients = b.gradients_n.const_data_ptr();
  params.gradient_dtype = kernel_dtype(b.gradients_n);
  params.decayed = b.decayed_G.const_data_ptr<std::uint8_t>();
  params.learning_rate = scalars + StepScalars::kLearningRate;
  params.gradient_scale = scalars + StepScalars::kGradientScale;
  params.apply = scalars + StepScalars::kApply;
  params.num_updates = num_updates_1.const_data_ptr<double>();
  params.beta1 = constants.beta1;
  params.beta2 = constants.beta2;
  params.epsilon = constants.epsilon;
  params.weight_decay = constants.weight_decay;
  launch_fused_adamw(params, current_stream(b.values_n));
}
#endif

}  // namespace

void fused_adamw(FusedAdamWBucket& bucket, const AdamWConstants& constants,
                 const at::Tensor& scalars_K, const at::Tensor& num_updates_1) {
  check_bucket(bucket, scalars_K, num_updates_1);
#ifdef BIRKHOFF_CUDA
  if (bucket.values_n.is_cuda()) return launch(bucket, constants, scalars_K, num_updates_1);
#endif
  reference_adamw(bucket, constants, scalars_K, num_updates_1);
}

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
      at::where(bucket.decayed_G.ne(0), decay, decay.new_ones({})).repeat_interleave(kGroup);
  const at::Tensor values_n =
      keep_n * bucket.values_n -
      step_size * m_n / (at::sqrt(v_n) * inverse_sqrt_correction2 + constants.epsilon);

  // A select and no product: 0 times a gradient that is not finite would be NaN.
  bucket.m_n.copy_(at::where(apply, m_n, bucket.m_n));
  bucket.v_n.copy_(at::where(apply, v_n, bucket.v_n));
  bucket.values_n.copy_(at::where(apply, values_n, bucket.values_n));
}

}  // namespace birkhoff
