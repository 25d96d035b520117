// Block attention: the queries of each block attend to that block's own list of keys. Legend: B
// batch (1 where all rows agree), H heads, L tokens, N blocks, b tokens per block, D head dim.
//
// Keys may have fewer heads than queries (Ainslie et al. 2023, "GQA"): with G query heads per key
// head, query head h reads key head h / G. Masks and biases belong to key heads. The fused path
// never copies keys to query heads.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "attention/kernels/common/key_window.h"
#include "attention/kernels/common/path.h"
#include "attention/kernels/relative_positions/relative_positions.h"
#include "attention/kernels/token_blocks/token_blocks.h"
#include "cluster/base/random/philox.h"

namespace birkhoff {

struct KeyBlocks {
  at::Tensor k_BHNbD, v_BHNbD;
  KeyWindow window{};  // of these blocks
  // bool, broadcastable, one for each offset of the window: the visible keys of the window.
  // Undefined: all.
  std::vector<at::Tensor> mask_BHNbb;
  at::Tensor bias_BHNbb{};  // added to the logits of each offset, broadcastable; undefined: none
  // Block n has the tokens n b, n b + 1, ..: relative positions apply to these keys.
  bool in_place = false;
  // [B, H, N], chosen_BHN int64, weights_BHN in the dtype of k and v. Block n of queries does not
  // see its own block of k and v, but block chosen_BHN[n], multiplied by weights_BHN[n]. The window
  // must be the own block (offset 0), and in_place is false. If a weight is 0, queries see a block
  // of zeros, and no gradient goes to the block or to the weight. Undefined: queries see the
  // window's blocks.
  at::Tensor chosen_BHN{}, weights_BHN{};
};

// For k and v [B, H, L, D]: queries see their own block, `look_back` blocks before it and
// `look_ahead` blocks after it, except keys that padding and documents mask.
KeyBlocks neighbouring_keys(const Blocks& blocks, const at::Tensor& k_BHLD,
                            const at::Tensor& v_BHLD, std::int64_t look_back,
                            std::int64_t look_ahead, bool causal);

// For k and v [B, H, L, D]: query i sees the keys j with |i - j| < width, if causal those with
// 0 <= i - j < width, except keys that padding and documents mask. Blocks need not be as long as
// the window.
KeyBlocks nearest_keys(const Blocks& blocks, const at::Tensor& k_BHLD, const at::Tensor& v_BHLD,
                       std::int64_t width, bool causal);

struct BlockAttention {
  at::Tensor q_BHNbD;
  // Unless one_softmax, the windows of all entries have the same number of blocks.
  std::vector<KeyBlocks> keys;
  // One softmax over the keys of all entries. Else one softmax per entry; their outputs are added.
  bool one_softmax = true;
  float dropout = 0;
  std::optional<NoiseKey> noise;
  RelativePositions relative{};  // to keys that are in place
  // [H], in q's dtype: for each query head, a logit that takes part in every softmax, as though it
  // belonged to a key whose value vector is 0 (Xiao et al. 2023, "Efficient Streaming Language
  // Models with Attention Sinks", section 3.3). Undefined: none.
  at::Tensor sink_H{};
};

// The fastest path up to `limit` that supports `in`.
PathChoice choose_path(const BlockAttention& in, Path limit);

// Returns [B, H, N, b, D], computed on that path; 0 for queries without a visible key.
at::Tensor attend_in_blocks(const BlockAttention& in, Path limit);

}  // namespace birkhoff
