// Padding inside mixed blocks. Legend: B batch, H heads, N blocks of b tokens, U mixes of them.
#pragma once

#include <ATen/core/Tensor.h>

#include "attention/kernels/token_blocks/token_blocks.h"

namespace birkhoff {

// The share of the weight of each key of U sorted blocks that is on existing tokens. Blocks have
// padding, and weights [B, H, U, N] are 0 for blocks of nothing else.
struct ExistingShare {
  at::Tensor visible_BHUb;  // bool: it is not 0; a NaN share stays visible
  at::Tensor share_BHUb;    // at least 1e-20

  ExistingShare(const Blocks& blocks, const at::Tensor& weights_BHUN);

  at::Tensor bias_BHUb(at::ScalarType dtype) const { return share_BHUb.log().to(dtype); }
  // For the tokens that a sample's last block lacks (MixPadding): the weights of the other blocks,
  // divided by their share.
  at::Tensor without_last_blocks(const Blocks& blocks, const at::Tensor& weights_BHUN) const;
};

}  // namespace birkhoff
