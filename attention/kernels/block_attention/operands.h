// The tensors of one call of fused attention in blocks. Legend: B batch, H heads, N blocks, b
// tokens of a block, D head dim.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "attention/kernels/block_attention/block_attention.h"

namespace birkhoff {

// Where the columns of a call's probabilities lie among all columns that have noise.
struct NoiseColumns {
  std::int64_t first = 0, all = 0;
};

// One softmax over all keys.
struct BlockOperands {
  at::Tensor q_BHNbD;
  std::vector<KeyBlocks> keys;  // masks are [B, H, N, b, b], biases have 5 dims
  float dropout = 0;
  std::optional<NoiseKey> noise;  // where dropout is at work
  NoiseColumns columns;
};

struct BlockResults {
  at::Tensor out_BHNbD;
  at::Tensor softmax_2BHNb;  // maximum and inverse sum: of q's dtype, or fp32 if that is wider
};

struct KeyGradients {
  at::Tensor d_k_BHNbD, d_v_BHNbD;
  // With a place for each block of each head: [B, H, N, b or 1, b or 1], as the bias is. Undefined
  // where there is none.
  at::Tensor d_bias;
};

struct BlockGradients {
  at::Tensor d_q_BHNbD;
  std::vector<KeyGradients> keys;
};

// Masks are expanded, all else is as `in` has it.
BlockOperands operands_of(const BlockAttention& in, NoiseColumns columns);

// Keys that each block of queries sees of these.
std::int64_t num_columns(const KeyBlocks& keys);

// New tensors, unset: rows contiguous where q's and the keys' are, else in the layers' order, [B,
// N, b, H, D]. Gradients of biases are zeros of the dtype `bias_sums`.
BlockResults new_results(const BlockOperands& operands);
BlockGradients new_gradients(const BlockOperands& operands, at::ScalarType bias_sums);

}  // namespace birkhoff
