// The keys that each block sees, concatenated, for paths that do not handle blocks. Legend: B
// batch, H heads, N blocks, b tokens per block, W keys that a block sees, D head dim.
#pragma once

#include "attention/kernels/block_attention/block_attention.h"

namespace birkhoff {

struct ListedKeys {
  at::Tensor k_BHNWD, v_BHNWD;
  at::Tensor mask_BHNbW, bias_BHNbW;  // undefined: all visible, no bias
  // int64: the distance of each key from each query, for keys that are in place; bool: whether a
  // key is.
  at::Tensor distance_bW{}, in_place_W{};
};

ListedKeys list_keys(const BlockAttention& in);

}  // namespace birkhoff
