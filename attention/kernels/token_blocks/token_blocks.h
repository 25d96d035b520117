// Sequences cut into blocks. Legend: B batch (1 where all rows agree), H heads, L tokens, N blocks,
// b tokens of a block, D head dim.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace birkhoff {

// What hides keys besides order.
struct TokenMasks {
  at::Tensor key_lengths_B;  // int64; keys at >= length are padding. Undefined: none are.
  at::Tensor segments_BL;    // document ids, never decreasing along a row. Undefined: one document.
};

// How the tokens of self-attention, q [B, H, L, D] and as many keys, fall into blocks of b tokens;
// the last block may be part padding.
class Blocks {
 public:
  Blocks(const at::Tensor& q_BHLD, const TokenMasks& masks, std::int64_t block, bool causal);

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

}  // namespace birkhoff
