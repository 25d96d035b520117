// Sequences cut into blocks, and attention of each block's queries to that block's own list of
// keys. Legend: B batch (1 where all rows agree), H heads, L tokens, N blocks, b tokens of a block,
// D head dim.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "attention/attention.h"

namespace birkhoff {

// How one self-attention input falls into blocks of b tokens; the last block may be part padding.
class Blocks {
 public:
  Blocks(const AttentionInput& in, std::int64_t block, bool causal);

  std::int64_t num_blocks() const { return num_blocks_; }
  std::int64_t block() const { return block_; }  // b
  // Dim `dim` of length L becomes two, [N, b]; missing tokens are zeros. A view where L = N b.
  at::Tensor fold(const at::Tensor& x, std::int64_t dim) const;
  // The reverse: dims dim and dim + 1 become one of length L.
  at::Tensor unfold(const at::Tensor& x, std::int64_t dim) const;

  // bool [B, 1, N, b, b]: which keys of block n + offset padding and documents let the queries of
  // block n see. Undefined: all.
  at::Tensor legal(std::int64_t offset) const;
  // bool: tokens that are not padding. Undefined: all that matter are.
  const at::Tensor& valid_BNb() const { return valid_BNb_; }
  // Of bool tensors where the input lives.
  at::TensorOptions mask_options() const { return at::TensorOptions(at::kBool).device(device_); }
  // Document ids. Undefined: one document.
  const at::Tensor& segments_BNb() const { return segments_BNb_; }

 private:
  std::int64_t block_, num_tokens_, num_blocks_;
  at::Device device_;
  at::Tensor valid_BNb_, segments_BNb_;
};

// A new tensor like x [B, H, N, b, D], unset: contiguous where x is, else in the layers' order,
// [B, N, b, H, D].
at::Tensor new_blocks_like(const at::Tensor& x_BHNbD);

// x [.., N at `dim`, ..] with entry n replaced by entry n + offset, `fill` where there is none.
at::Tensor shift_blocks(const at::Tensor& x, std::int64_t dim, std::int64_t offset,
                        const at::Scalar& fill);

// Block mixes sum_v weights_uv x_v [B, H, U, b, D], for weights [B, H, U, N] and x [B, H, N, b, D].
at::Tensor mix_blocks(const at::Tensor& weights_BHUN, const at::Tensor& x_BHNbD);

// Keys in blocks, of which block n's queries see blocks n + first_offset .. n + last_offset, where
// those exist.
struct KeyBlocks {
  at::Tensor k_BHNbD, v_BHNbD;
  std::int64_t first_offset = 0, last_offset = 0;
  bool causal = false;  // of their own block (offset 0), queries see keys up to their own
  // bool, broadcastable, one for each offset: what they may see besides. Undefined: all.
  std::vector<at::Tensor> legal_BHNbb;
  at::Tensor bias_BHNbb;  // added to logits of each offset, broadcastable; undefined: none
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

enum class BlockPath {
  kReference,  // plain operations on concatenated keys
  kComposed,   // the same keys through LibTorch's fused attention, blocks as batch
  kFused,      // the kernels of fused_block_attention.h
};

// The fastest path up to `limit` that can do this.
BlockPath fastest_path(const BlockAttention& in, BlockPath limit = BlockPath::kFused);

// [B, H, N, b, D]; queries without a legal key give 0.
at::Tensor attend_in_blocks(const BlockAttention& in, BlockPath path);

}  // namespace birkhoff
