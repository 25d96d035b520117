#include "attention/kernels/block_attention/gpu_terms.h"

#include <ATen/TensorOperators.h>

#include <algorithm>
#include <numbers>

namespace birkhoff {
namespace {

// The blocks of x [B, H, N, b, D] as one sequence, [B, H, N b, D].
at::Tensor sequence_of(const at::Tensor& x) { return x.flatten(2, 3); }
// The same as a view, to which kernels and products add.
at::Tensor sequence_in(const at::Tensor& x) {
  return x.view({x.size(0), x.size(1), x.size(2) * x.size(3), x.size(4)});
}

// Calls make(lowest, highest) with the distances to the keys in place; undefined terms without any.
template <typename Make>
DistanceTerms terms_in_place(const BlockOperands& operands, Make make) {
  const auto keys = std::find_if(operands.keys.begin(), operands.keys.end(),
                                 [](const KeyBlocks& each) { return each.in_place; });
  if (!operands.relative.defined() || keys == operands.keys.end()) return {};
  const KeyWindow& window = keys->window;
  const std::int64_t block = operands.q_BHNbD.size(3);
  const bool own_past = window.causal && window.last_offset == 0;
  return make(window.first_offset * block - (block - 1),
              window.last_offset * block + (own_past ? 0 : block - 1));
}

at::Tensor sink_gradient(const BlockOperands& operands, const BlockResults& results,
                         const at::Tensor& delta_BHNb) {
  const at::Tensor sink_H11 = operands.sink_H.to(at::kFloat).view({-1, 1, 1});
  // At most 0 where a query sees a key; elsewhere z is 0, and a large power times 0 would be NaN.
  const at::Tensor power_BHNb =
      (sink_H11 * std::numbers::log2e_v<float> - results.softmax_2BHNb[0]).clamp_max(0);
  const at::Tensor terms_BHNb = power_BHNb.exp2() * results.softmax_2BHNb[1] * delta_BHNb;
  return terms_BHNb.sum(3).sum(2).sum(0).neg().to(operands.sink_H.scalar_type());
}

}  // namespace

DistanceTerms forward_terms(const BlockOperands& operands) {
  return terms_in_place(operands, [&](std::int64_t lowest, std::int64_t highest) {
    const at::Tensor q_BHLD = sequence_of(operands.q_BHNbD);
    return forward_terms(operands.relative, lowest, highest, q_BHLD, q_BHLD.size(2));
  });
}

DistanceTerms backward_terms(const BlockOperands& operands, const at::Tensor& d_out_BHNbD) {
  return terms_in_place(operands, [&](std::int64_t lowest, std::int64_t highest) {
    const at::Tensor q_BHLD = sequence_of(operands.q_BHNbD);
    return backward_terms(operands.relative, lowest, highest, q_BHLD, sequence_of(d_out_BHNbD),
                          q_BHLD.size(2));
  });
}

void add_values(const DistanceTerms& terms, const BlockResults& results) {
  if (terms.defined()) add_values(terms, sequence_in(results.out_BHNbD));
}

void add_term_gradients(const BlockOperands& operands, const BlockResults& results,
                        const at::Tensor& d_out_BHNbD, const at::Tensor& delta_BHNb,
                        const DistanceTerms& terms, BlockGradients& gradients) {
  if (operands.sink_H.defined()) {
    gradients.d_sink_H = sink_gradient(operands, results, delta_BHNb);
  }
  if (!operands.relative.defined()) return;
  const TableGradients tables = add_term_gradients(
      operands.relative, terms, sequence_of(operands.q_BHNbD), sequence_of(d_out_BHNbD),
      operands.scale(), sequence_in(gradients.d_q_BHNbD));
  gradients.d_relative_keys_HRD = tables.d_keys_HRD;
  gradients.d_relative_values_HRD = tables.d_values_HRD;
  gradients.d_relative_bias_HR = tables.d_bias_HR;
}

}  // namespace birkhoff
