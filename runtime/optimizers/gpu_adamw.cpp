#include "runtime/optimizers/gpu_adamw.h"

#include "cluster/base/error.h"
#include "cluster/base/gpu/device.h"
#include "runtime/optimizers/gpu_adamw_params.h"

namespace birkhoff {
namespace {

constexpr std::int64_t kGroup = FusedAdamWParams::kGroup;

void check_bucket(const FusedAdamWBucket& b, const at::Tensor& scalars_K,
                  const at::Tensor& num_updates_1) {
  const std::int64_t n = b.values_n.numel();
  require(n % kGroup == 0, "fused_adamw: the element count must be a multiple of 64");
  for (const at::Tensor& tensor : {b.values_n, b.gradients_n, b.m_n, b.v_n}) {
    require(tensor.is_contiguous() && tensor.numel() == n,
            "fused_adamw: tensors must be contiguous and equally long");
  }
  require(b.m_n.scalar_type() == b.values_n.scalar_type() &&
              b.v_n.scalar_type() == b.values_n.scalar_type(),
          "fused_adamw: moments must have the values' dtype");
  require(b.gradients_n.scalar_type() == b.values_n.scalar_type() ||
              b.gradients_n.scalar_type() == at::kBFloat16,
          "fused_adamw: gradients must have the values' dtype or be bf16");
  require(b.decayed_G.scalar_type() == at::kByte && b.decayed_G.is_contiguous() &&
              b.decayed_G.numel() == n / kGroup,
          "fused_adamw: decay flags must be u8, one per 64 elements");
  require(scalars_K.scalar_type() == at::kDouble && num_updates_1.scalar_type() == at::kDouble,
          "fused_adamw: scalars must be fp64");
  for (const at::Tensor& tensor :
       {b.gradients_n, b.m_n, b.v_n, b.decayed_G, scalars_K, num_updates_1}) {
    require(tensor.device() == b.values_n.device(), "fused_adamw: tensors must be on one device");
  }
}

}  // namespace

void fused_adamw(FusedAdamWBucket& b, const AdamWConstants& constants, const at::Tensor& scalars_K,
                 const at::Tensor& num_updates_1) {
  check_bucket(b, scalars_K, num_updates_1);
  require(kHasGpuKernels && b.values_n.is_cuda() && b.values_n.scalar_type() == at::kFloat,
          "fused_adamw: values must be fp32 on a GPU");
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
  if constexpr (kHasGpuKernels) launch_fused_adamw(params, current_stream(b.values_n));
}

}  // namespace birkhoff
