// The attention map of any mechanism: the weights with which its outputs read the values.
//
// Legend: B batch, H query heads, L queries, S keys, D head dim.
#pragma once

#include <ATen/core/Tensor.h>

#include "attention/mechanism.h"

namespace birkhoff {

// A [B, H, L, S] with out_BHL = sum_s A_BHLs v_Bs + c, in evaluation. A mechanism chooses its
// weights by q, k and x, and its output is linear in v up to c, the values of relative positions.
// So the outputs for values that are columns of the identity, D of them at a time, are the map.
// Runs the reference path S / D + 1 times, in fp32 or wider. No gradients.
at::Tensor attention_map(const Mechanism& mechanism, const AttentionInput& in);

}  // namespace birkhoff
