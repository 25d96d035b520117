// The tensors of one call of fused block attention. Legend: B batch, H heads, N blocks, b tokens
// per block, D head dim.
#pragma once

#include <ATen/core/Tensor.h>

#include <cmath>
#include <cstdint>
#include <optional>
#include <vector>

#include "attention/kernels/block_attention/block_attention.h"

namespace birkhoff {

// The range of a call's columns of probabilities among all columns that have noise.
struct NoiseColumns {
  std::int64_t first = 0, all = 0;
};

// Operands of one softmax over all keys.
struct BlockOperands {
  at::Tensor q_BHNbD;
  std::vector<KeyBlocks> keys;  // masks are [B, H, N, b, b], biases have 5 dims
  float dropout = 0;
  std::optional<NoiseKey> noise;  // set only with dropout
  NoiseColumns columns;
  RelativePositions relative{};
  at::Tensor sink_H{};
  std::int64_t padding = 0;  // the last columns of all rows are zeros that do not count for D

  double scale() const { return 1 / std::sqrt(static_cast<double>(q_BHNbD.size(4) - padding)); }
};

struct BlockResults {
  at::Tensor out_BHNbD;
  at::Tensor softmax_2BHNb;  // maximum and inverse sum; q's dtype, or fp32 if that is wider
};

struct KeyGradients {
  // Undefined for an entry that does not own them.
  at::Tensor d_k_BHNbD, d_v_BHNbD;
  // Separate for each block of each head: [B, H, N, b or 1, b or 1], as the bias is. Undefined
  // without a bias.
  at::Tensor d_bias;
  at::Tensor d_weights_BHN{};  // on the CPU, of chosen blocks
};

struct BlockGradients {
  at::Tensor d_q_BHNbD;
  std::vector<KeyGradients> keys;
  // Undefined without the operand.
  at::Tensor d_relative_keys_HRD{}, d_relative_values_HRD{}, d_sink_H{}, d_relative_bias_HR{};
};

// Expands masks and takes the rest from `in`; without dropout there is no noise.
BlockOperands operands_of(const BlockAttention& in, NoiseColumns columns);

// The same operands with rows that kernels read: for the CPU contiguous ones; for a GPU (also if
// they are elsewhere) aligned ones of a multiple of 8 columns.
BlockOperands with_cpu_rows(BlockOperands operands);
BlockOperands with_gpu_rows(BlockOperands operands);

// The number of these keys that each block of queries sees.
std::int64_t num_columns(const KeyBlocks& keys);

// The entry that gets the gradients of the keys of entry s: an earlier one of chosen blocks that
// has the same k and v, else s itself.
std::size_t owner_of_gradients(const std::vector<KeyBlocks>& keys, std::size_t s);

// New, uninitialized tensors: contiguous where q and the keys are, else in the layers' order [B, N,
// b, H, D]. Gradients of biases and of weights are zeros of dtype `bias_sums`.
BlockResults new_results(const BlockOperands& operands);
BlockGradients new_gradients(const BlockOperands& operands, at::ScalarType bias_sums);

}  // namespace birkhoff
