#include "attention/kernels/block_attention/gpu_terms.h"

#include <ATen/TensorOperators.h>

#include <numbers>

namespace birkhoff {

at::Tensor sink_gradient(const BlockOperands& operands, const BlockResults& results,
                         const at::Tensor& delta_BHNb) {
  const at::Tensor sink_H11 = operands.sink_H.to(at::kFloat).view({-1, 1, 1});
  // At most 0 where a query sees a key; elsewhere z is 0, and a large power times 0 would be NaN.
  const at::Tensor power_BHNb =
      (sink_H11 * std::numbers::log2e_v<float> - results.softmax_2BHNb[0]).clamp_max(0);
  const at::Tensor terms_BHNb = power_BHNb.exp2() * results.softmax_2BHNb[1] * delta_BHNb;
  return terms_BHNb.sum(3).sum(2).sum(0).neg().to(operands.sink_H.scalar_type());
}

}  // namespace birkhoff
