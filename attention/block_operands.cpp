#include "attention/block_operands.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

namespace birkhoff {
namespace {

at::ScalarType sum_type(const at::Tensor& x) { return at::toOpMathType(x.scalar_type()); }

}  // namespace

BlockOperands operands_of(const BlockAttention& in, NoiseColumns columns) {
  BlockOperands operands;
  operands.q_BHNbD = in.q_BHNbD;
  for (const KeyBlocks& keys : in.keys) {
    operands.keys_BHNbD.insert(operands.keys_BHNbD.end(), {keys.k_BHNbD, keys.v_BHNbD});
    operands.biases.push_back(keys.bias_BHNbb);
    operands.windows.insert(operands.windows.end(),
                            {keys.first_offset, keys.last_offset, keys.causal});
    const at::IntArrayRef sizes = keys.k_BHNbD.sizes();
    for (const at::Tensor& mask : keys.legal_BHNbb) {
      operands.legal_BHNbb.push_back(
          mask.defined() ? mask.expand({sizes[0], sizes[1], sizes[2], sizes[3], sizes[3]}) : mask);
    }
  }
  operands.dropout = in.dropout;
  if (in.dropout > 0) operands.noise = in.noise;
  operands.columns = columns;
  return operands;
}

std::int64_t num_columns(const KeyBlocks& keys) {
  return (keys.last_offset - keys.first_offset + 1) * keys.k_BHNbD.size(3);
}

BlockResults new_results(const BlockOperands& operands) {
  const at::Tensor& q = operands.q_BHNbD;
  return {new_blocks_like(q), at::empty({2, q.size(0), q.size(1), q.size(2), q.size(3)},
                                        q.options().dtype(sum_type(q)))};
}

BlockGradients new_gradients(const BlockOperands& operands, at::ScalarType bias_sums) {
  const at::Tensor& q = operands.q_BHNbD;
  BlockGradients gradients{new_blocks_like(q), {}, {}};
  for (std::size_t s = 0; s < operands.num_sources(); ++s) {
    for (const at::Tensor& keys : {operands.keys_BHNbD[2 * s], operands.keys_BHNbD[2 * s + 1]}) {
      gradients.d_keys_BHNbD.push_back(new_blocks_like(keys));
    }
    const at::Tensor& bias = operands.biases[s];
    gradients.d_biases.push_back(
        bias.defined() ? at::zeros({q.size(0), q.size(1), q.size(2), bias.size(3), bias.size(4)},
                                   q.options().dtype(bias_sums))
                       : at::Tensor());
  }
  return gradients;
}

}  // namespace birkhoff
