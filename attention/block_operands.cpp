#include "attention/block_operands.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

namespace birkhoff {
namespace {

at::Tensor new_like(const at::Tensor& x_BHNbD, bool zero) {
  const auto make = [&](at::IntArrayRef sizes) {
    return zero ? at::zeros(sizes, x_BHNbD.options()) : at::empty(sizes, x_BHNbD.options());
  };
  if (x_BHNbD.is_contiguous()) return make(x_BHNbD.sizes());
  return make({x_BHNbD.size(0), x_BHNbD.size(2), x_BHNbD.size(3), x_BHNbD.size(1), x_BHNbD.size(4)})
      .permute({0, 3, 1, 2, 4});
}

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
  const auto dtype = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return {new_like(q, /*zero=*/false),
          at::empty({2, q.size(0), q.size(1), q.size(2), q.size(3)}, q.options().dtype(dtype))};
}

BlockGradients new_gradients(const BlockOperands& operands, bool zero_shared) {
  const at::Tensor& q = operands.q_BHNbD;
  BlockGradients gradients{new_like(q, /*zero=*/false), {}, {}};
  for (std::size_t s = 0; s < operands.num_sources(); ++s) {
    for (const at::Tensor& keys : {operands.keys_BHNbD[2 * s], operands.keys_BHNbD[2 * s + 1]}) {
      gradients.d_keys_BHNbD.push_back(new_like(keys, zero_shared && !operands.owned(s)));
    }
    gradients.d_biases_BHNb.push_back(
        operands.biases[s].defined()
            ? at::empty({q.size(0), q.size(1), q.size(2), q.size(3)}, q.options().dtype(at::kFloat))
            : at::Tensor());
  }
  return gradients;
}

}  // namespace birkhoff
