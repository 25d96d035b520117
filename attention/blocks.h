// Sequences cut into blocks, and attention of each block's queries to that block's own list of
// keys. Legend: B batch (1 where all rows agree), H heads, L tokens, N blocks, b tokens of a block,
// W keys listed for a block, D head dim.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "attention/attention.h"

namespace birkhoff {

// How one self-attention input falls into blocks of b tokens; the last block may be part padding.
class Blocks {
 public:
  Blocks(const AttentionInput& in, std::int64_t block, bool causal);

  std::int64_t num_blocks() const { return num_blocks_; }
  // Dim `dim` of length L becomes two, [N, b]; missing tokens are zeros. A view where L = N b.
  at::Tensor fold(const at::Tensor& x, std::int64_t dim) const;
  // The reverse: dims dim and dim + 1 become one of length L.
  at::Tensor unfold(const at::Tensor& x, std::int64_t dim) const;

  // bool [B, 1, N, b, b]: which keys of block n + offset the queries of block n may see (token
  // order, padding and documents respected). Offset 0: their own block.
  at::Tensor legal(std::int64_t offset) const;
  // Neither padding nor documents restrict anything.
  bool plain() const { return !valid_BNb_.defined() && !segments_BNb_.defined(); }
  // bool: tokens that are not padding. Undefined: all that matter are.
  const at::Tensor& valid_BNb() const { return valid_BNb_; }
  // Of bool tensors where the input lives.
  at::TensorOptions mask_options() const { return at::TensorOptions(at::kBool).device(device_); }
  // Document ids. Undefined: one document.
  const at::Tensor& segments_BNb() const { return segments_BNb_; }

 private:
  std::int64_t block_, num_tokens_, num_blocks_;
  bool causal_;
  at::Device device_;
  at::Tensor valid_BNb_, segments_BNb_;
};

// x [.., N at `dim`, ..] with entry n replaced by entry n + offset, `fill` where there is none.
at::Tensor shift_blocks(const at::Tensor& x, std::int64_t dim, std::int64_t offset,
                        const at::Scalar& fill);

// Concatenates lists of keys or values [B, H, N, w, D] of each block, in memory laid out so that
// attend_in_blocks need not copy.
at::Tensor concatenate_keys(at::TensorList parts_BHNwD);

// Block mixes sum_v weights_uv x_v [B, H, U, b, D], for weights [B, H, U, N] and x [B, H, N, b, D].
at::Tensor mix_blocks(const at::Tensor& weights_BHUN, const at::Tensor& x_BHNbD);

struct BlockAttention {
  at::Tensor q_BHNbD, k_BHNWD, v_BHNWD;
  at::Tensor legal_BHNbW;  // bool, broadcastable; undefined: all keys, or the past ones if `causal`
  bool causal = false;     // W = b: queries see their own block's keys up to their own
  at::Tensor bias_BHNbW;   // added to logits, broadcastable; undefined: none
  std::int64_t num_softmaxes = 1;  // the W keys are cut into so many parts, each with a softmax of
                                   // its own; outputs are added
  float dropout = 0;
  std::optional<NoiseKey> noise;
};

// [B, H, N, b, D]; queries without a legal key give 0. `fused`: use LibTorch's fused kernel where
// it can do this.
at::Tensor attend_in_blocks(const BlockAttention& in, bool fused);

}  // namespace birkhoff
