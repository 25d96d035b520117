// Attention of each block's queries to that block's own list of keys. Legend: B batch (1 where all
// rows agree), H heads, L tokens, N blocks, b tokens of a block, D head dim.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "attention/kernels/common/key_window.h"
#include "attention/kernels/common/path.h"
#include "attention/kernels/token_blocks/token_blocks.h"
#include "cluster/base/random/philox.h"

namespace birkhoff {

struct KeyBlocks {
  at::Tensor k_BHNbD, v_BHNbD;
  KeyWindow window{};  // of these blocks
  // bool, broadcastable, one for each offset of the window: what queries may see besides.
  // Undefined: all.
  std::vector<at::Tensor> legal_BHNbb;
  at::Tensor bias_BHNbb{};  // added to logits of each offset, broadcastable; undefined: none
};

// k and v [B, H, L, D]: queries see their own block, `look_back` blocks before it and `look_ahead`
// after it, less what padding and documents hide.
KeyBlocks neighbouring_keys(const Blocks& blocks, const at::Tensor& k_BHLD,
                            const at::Tensor& v_BHLD, std::int64_t look_back,
                            std::int64_t look_ahead, bool causal);

struct BlockAttention {
  at::Tensor q_BHNbD;
  std::vector<KeyBlocks> keys;  // of one width, where each has a softmax of its own
  bool one_softmax = true;      // over all keys; else one for each entry, and outputs are added
  float dropout = 0;
  std::optional<NoiseKey> noise;
};

// The fastest path up to `limit` that can do this.
Path choose_path(const BlockAttention& in, Path limit);

// [B, H, N, b, D] on that path; queries without a legal key give 0.
at::Tensor attend_in_blocks(const BlockAttention& in, Path limit);

}  // namespace birkhoff
