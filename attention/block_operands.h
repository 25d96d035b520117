// The tensors of one call of fused attention in blocks, in the order in which its kernels want
// them. Legend: B batch, H heads, N blocks, b tokens of a block, D head dim.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "attention/blocks.h"
#include "attention/tile_attention.h"

namespace birkhoff {

// Where the columns of a call's probabilities lie among all columns that have noise.
struct NoiseColumns {
  std::int64_t first = 0, all = 0;
};

struct BlockOperands {
  at::Tensor q_BHNbD;
  std::vector<at::Tensor> keys_BHNbD;   // k, v of each source
  std::vector<at::Tensor> biases;       // of each source, of 5 dims; may be undefined
  std::vector<at::Tensor> legal_BHNbb;  // of each offset of each source; may be undefined
  // First and last offset and `causal` of each source: what autograd can carry.
  std::vector<std::int64_t> windows;
  float dropout = 0;
  std::optional<NoiseKey> noise;  // where dropout is at work
  NoiseColumns columns;

  std::size_t num_sources() const { return keys_BHNbD.size() / 2; }
  // Each tile of source s's keys is seen by one tile of queries.
  bool owned(std::size_t s) const {
    return windows[3 * s] == 0 && windows[3 * s + 1] == 0 && q_BHNbD.size(3) <= kTile;
  }
};

struct BlockResults {
  at::Tensor out_BHNbD;
  at::Tensor softmax_2BHNb;  // maximum and inverse sum: of q's dtype, or fp32 if that is wider
};

struct BlockGradients {
  at::Tensor d_q_BHNbD;
  std::vector<at::Tensor> d_keys_BHNbD;  // of k, v of each source
  // Of each source, with a place for each block of each head: [B, H, N, b or 1, b or 1], as the
  // bias is. Undefined where it has none.
  std::vector<at::Tensor> d_biases;
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
