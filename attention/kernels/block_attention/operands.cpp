#include "attention/kernels/block_attention/operands.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

namespace birkhoff {
namespace {

at::ScalarType sum_type(const at::Tensor& x) { return at::toOpMathType(x.scalar_type()); }

}  // namespace

BlockOperands operands_of(const BlockAttention& in, NoiseColumns columns) {
  BlockOperands operands{.q_BHNbD = in.q_BHNbD,
                         .keys = in.keys,
                         .dropout = in.dropout,
                         .noise = in.dropout > 0 ? in.noise : std::nullopt,
                         .columns = columns,
                         .relative = in.relative,
                         .sink_H = in.sink_H};
  for (KeyBlocks& keys : operands.keys) {
    const at::IntArrayRef sizes = keys.k_BHNbD.sizes();
    for (at::Tensor& mask : keys.mask_BHNbb) {
      if (mask.defined()) mask = mask.expand({sizes[0], sizes[1], sizes[2], sizes[3], sizes[3]});
    }
  }
  return operands;
}

std::int64_t num_columns(const KeyBlocks& keys) {
  return keys.window.num_offsets() * keys.k_BHNbD.size(3);
}

BlockResults new_results(const BlockOperands& operands) {
  const at::Tensor& q = operands.q_BHNbD;
  return {new_blocks_like(q), at::empty({2, q.size(0), q.size(1), q.size(2), q.size(3)},
                                        q.options().dtype(sum_type(q)))};
}

BlockGradients new_gradients(const BlockOperands& operands, at::ScalarType bias_sums) {
  const at::Tensor& q = operands.q_BHNbD;
  BlockGradients gradients{.d_q_BHNbD = new_blocks_like(q), .keys = {}};
  for (const KeyBlocks& keys : operands.keys) {
    const at::Tensor& bias = keys.bias_BHNbb;
    gradients.keys.push_back({.d_k_BHNbD = new_blocks_like(keys.k_BHNbD),
                              .d_v_BHNbD = new_blocks_like(keys.v_BHNbD),
                              .d_bias = bias.defined()
                                            ? at::zeros({q.size(0), keys.k_BHNbD.size(1), q.size(2),
                                                         bias.size(3), bias.size(4)},
                                                        q.options().dtype(bias_sums))
                                            : at::Tensor()});
  }
  return gradients;
}

}  // namespace birkhoff
