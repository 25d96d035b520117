#include "attention/kernels/block_attention/operands.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <utility>

#include "attention/kernels/common/fitting_rows.h"

namespace birkhoff {
namespace {

at::ScalarType sum_type(const at::Tensor& x) { return at::toOpMathType(x.scalar_type()); }

// The operands with fit(x) for queries, keys and values. Values that are keys stay the same tensor.
template <typename Fit>
BlockOperands with_rows(BlockOperands operands, Fit fit) {
  operands.q_BHNbD = fit(operands.q_BHNbD);
  for (KeyBlocks& keys : operands.keys) {
    const bool tied = keys.v_BHNbD.is_same(keys.k_BHNbD);
    keys.k_BHNbD = fit(keys.k_BHNbD);
    keys.v_BHNbD = tied ? keys.k_BHNbD : fit(keys.v_BHNbD);
  }
  return operands;
}

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

BlockOperands with_cpu_rows(BlockOperands operands) {
  return with_rows(std::move(operands),
                   [](const at::Tensor& x) { return with_contiguous_rows(x); });
}

BlockOperands with_gpu_rows(BlockOperands operands) {
  const std::int64_t D = operands.q_BHNbD.size(4);
  operands = with_rows(std::move(operands), [](const at::Tensor& x) {
    return with_aligned_rows(with_whole_columns(x));
  });
  operands.padding = operands.q_BHNbD.size(4) - D;
  operands.relative = operands.relative.with_whole_columns();
  return operands;
}

std::int64_t num_columns(const KeyBlocks& keys) {
  return keys.window.num_offsets() * keys.k_BHNbD.size(3);
}

std::size_t owner_of_gradients(const std::vector<KeyBlocks>& keys, std::size_t s) {
  for (std::size_t owner = 0; owner < s; ++owner) {
    const KeyBlocks& earlier = keys[owner];
    if (earlier.chosen_BHN.defined() && earlier.k_BHNbD.is_same(keys[s].k_BHNbD) &&
        earlier.v_BHNbD.is_same(keys[s].v_BHNbD)) {
      return owner;
    }
  }
  return s;
}

BlockResults new_results(const BlockOperands& operands) {
  const at::Tensor& q = operands.q_BHNbD;
  return {new_blocks_like(q), at::empty({2, q.size(0), q.size(1), q.size(2), q.size(3)},
                                        q.options().dtype(sum_type(q)))};
}

BlockGradients new_gradients(const BlockOperands& operands, at::ScalarType bias_sums) {
  const at::Tensor& q = operands.q_BHNbD;
  BlockGradients gradients{.d_q_BHNbD = new_blocks_like(q), .keys = {}};
  const auto zeros = [&](at::IntArrayRef sizes) {
    return at::zeros(sizes, q.options().dtype(bias_sums));
  };
  for (std::size_t s = 0; s < operands.keys.size(); ++s) {
    const KeyBlocks& keys = operands.keys[s];
    KeyGradients& made = gradients.keys.emplace_back();
    if (owner_of_gradients(operands.keys, s) == s) {
      made.d_k_BHNbD = new_blocks_like(keys.k_BHNbD);
      made.d_v_BHNbD = new_blocks_like(keys.v_BHNbD);
    }
    const at::Tensor& bias = keys.bias_BHNbb;
    if (bias.defined()) {
      made.d_bias = zeros({q.size(0), keys.k_BHNbD.size(1), q.size(2), bias.size(3), bias.size(4)});
    }
    if (keys.weights_BHN.defined()) made.d_weights_BHN = zeros(keys.weights_BHN.sizes());
  }
  return gradients;
}

}  // namespace birkhoff
