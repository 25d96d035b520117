// The division of sequences into blocks. Legend: B batch (1 where all rows agree), H heads, L
// tokens, N blocks, b tokens per block, D head dim.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace birkhoff {

// The masks on keys, apart from causal order.
struct TokenMasks {
  at::Tensor key_lengths_B;  // int64; keys at >= length are padding. Undefined: no padding.
  at::Tensor segments_BL;    // document ids, never decreasing along a row. Undefined: one document.
};

// The blocks of b tokens of self-attention with q [B, H, L, D] and as many keys. The last block may
// be partly padding.
class Blocks {
 public:
  Blocks(const at::Tensor& q_BHLD, const TokenMasks& masks, std::int64_t block, bool causal);

  std::int64_t num_blocks() const { return num_blocks_; }
  std::int64_t block() const { return block_; }  // b
  // Splits dim `dim` of length L into two, [N, b]; missing tokens are zeros. A view if L = N b.
  at::Tensor to_blocks(const at::Tensor& x, std::int64_t dim) const;
  // The reverse: merges dims dim and dim + 1 into one of length L.
  at::Tensor from_blocks(const at::Tensor& x, std::int64_t dim) const;

  // bool, broadcastable to [B, 1, N, b, b]: the keys of block n + offset that padding and documents
  // leave visible to the queries of block n. Undefined: all.
  at::Tensor mask(std::int64_t offset) const;
  // bool: tokens that are not padding. Undefined: no query can see padding.
  const at::Tensor& valid_BNb() const { return valid_BNb_; }
  // int64: tokens at lengths_b and after are padding. Defined where valid_BNb() is.
  const at::Tensor& lengths_B() const { return lengths_B_; }
  // Options for bool tensors on the input's device.
  at::TensorOptions mask_options() const { return at::TensorOptions(at::kBool).device(device_); }
  // Document ids. Undefined: one document.
  const at::Tensor& segments_BNb() const { return segments_BNb_; }

 private:
  std::int64_t block_, num_tokens_, num_blocks_;
  at::Device device_;
  at::Tensor valid_BNb_, lengths_B_, segments_BNb_;
};

// A new, uninitialized tensor like x [B, H, N, b, D]: contiguous where x is, else in the layers'
// order [B, N, b, H, D].
at::Tensor new_blocks_like(const at::Tensor& x_BHNbD);
// The same with another number of blocks.
at::Tensor new_blocks(const at::Tensor& x_BHNbD, std::int64_t num_blocks);

// x [.., N at `dim`, ..] with entry n replaced by entry n + offset, or by `fill` if there is none.
at::Tensor shift_blocks(const at::Tensor& x, std::int64_t dim, std::int64_t offset,
                        const at::Scalar& fill);

}  // namespace birkhoff
