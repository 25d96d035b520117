#include "runtime/optimizers/gpu_fused_update.h"

#include "cluster/base/error.h"
#include "cluster/base/gpu/device.h"
#include "runtime/optimizers/gpu_fused_update_params.h"

namespace birkhoff {
namespace {

void check_bucket(const FusedBucket& b, int num_states, const at::Tensor& scalars_K,
                  const at::Tensor& num_updates_1) {
  constexpr std::int64_t kGroup = kDecayGroup;
  const std::int64_t n = b.values_n.numel();
  require(n % kGroup == 0, "fused_update: the element count must be a multiple of 64");
  require(b.states_n.size() == static_cast<std::size_t>(num_states),
          "fused_update: the rule has another number of states");
  const auto check = [&](const at::Tensor& tensor) {
    require(tensor.is_contiguous() && tensor.numel() == n,
            "fused_update: tensors must be contiguous and equally long");
    require(tensor.device() == b.values_n.device(), "fused_update: tensors must be on one device");
  };
  check(b.gradients_n);
  for (const at::Tensor& state : b.states_n) {
    check(state);
    require(state.scalar_type() == b.values_n.scalar_type(),
            "fused_update: states must have the values' dtype");
  }
  require(b.values_n.is_contiguous(), "fused_update: values must be contiguous");
  require(b.gradients_n.scalar_type() == b.values_n.scalar_type() ||
              b.gradients_n.scalar_type() == at::kBFloat16,
          "fused_update: gradients must have the values' dtype or be bf16");
  require(b.decayed_G.scalar_type() == at::kByte && b.decayed_G.is_contiguous() &&
              b.decayed_G.numel() == n / kGroup,
          "fused_update: decay flags must be u8, one per 64 elements");
  require(scalars_K.scalar_type() == at::kDouble && num_updates_1.scalar_type() == at::kDouble,
          "fused_update: scalars must be fp64");
  for (const at::Tensor& tensor : {b.decayed_G, scalars_K, num_updates_1}) {
    require(tensor.device() == b.values_n.device(), "fused_update: tensors must be on one device");
  }
}

}  // namespace

template <typename Rule>
void fused_update(FusedBucket& b, const Rule& rule, const at::Tensor& scalars_K,
                  const at::Tensor& num_updates_1) {
  check_bucket(b, Rule::kNumStates, scalars_K, num_updates_1);
  require(kHasGpuKernels && b.values_n.is_cuda() && b.values_n.scalar_type() == at::kFloat,
          "fused_update: values must be fp32 on a GPU");
  const auto check_alignment = [](const at::Tensor& tensor) {
    require(fits_vectors(tensor, /*num_bytes=*/0),
            "fused_update: data must be aligned to 16 bytes");
  };
  check_alignment(b.values_n);
  check_alignment(b.gradients_n);
  const double* scalars = scalars_K.const_data_ptr<double>();
  FusedUpdateParams<Rule> params{};
  params.rule = rule;
  params.elements = b.values_n.numel();
  params.values = b.values_n.mutable_data_ptr<float>();
  for (std::size_t s = 0; s < b.states_n.size(); ++s) {
    check_alignment(b.states_n[s]);
    params.states[s] = b.states_n[s].mutable_data_ptr<float>();
  }
  params.gradients = b.gradients_n.const_data_ptr();
  params.gradient_dtype = kernel_dtype(b.gradients_n);
  params.decayed = b.decayed_G.const_data_ptr<std::uint8_t>();
  params.learning_rate = scalars + StepScalars::kLearningRate;
  params.gradient_scale = scalars + StepScalars::kGradientScale;
  params.apply = scalars + StepScalars::kApply;
  params.num_updates = num_updates_1.const_data_ptr<double>();
  if constexpr (kHasGpuKernels) launch_fused_update(params, current_stream(b.values_n));
}

template void fused_update(FusedBucket&, const AdamWRule&, const at::Tensor&, const at::Tensor&);
template void fused_update(FusedBucket&, const SgdRule&, const at::Tensor&, const at::Tensor&);

}  // namespace birkhoff
