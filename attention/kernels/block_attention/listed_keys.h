// The keys that each block sees, side by side, for paths that know no blocks. Legend: B batch, H
// heads, N blocks, b tokens of a block, W keys that a block sees, D head dim.
#pragma once

#include "attention/kernels/block_attention/block_attention.h"

namespace birkhoff {

struct ListedKeys {
  at::Tensor k_BHNWD, v_BHNWD;
  at::Tensor legal_BHNbW, bias_BHNbW;  // undefined: all, none
};

ListedKeys list_keys(const BlockAttention& in);

}  // namespace birkhoff
