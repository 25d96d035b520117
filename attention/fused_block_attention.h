// Attention in blocks through the kernels of tile_attention.h: no concatenated keys, no stored
// probabilities. The same results as the reference up to rounding, the same bits for any number of
// threads.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "attention/blocks.h"

namespace birkhoff {

// Whether the kernels can do this: fp32, fp64 or bf16 on the CPU, D <= 256, no bias, no dropout.
bool fits_fused(const BlockAttention& in);

// [B, H, N, b, D]; one softmax over all of in.keys, which fit.
at::Tensor attend_fused(const BlockAttention& in);

// The two passes of attend_fused, for who keeps by himself what lies between them.
struct FusedForward {
  at::Tensor out_BHNbD;
  at::Tensor softmax_2BHNb;  // each query's maximum and 1 / sum, for the backward pass
};
FusedForward fused_forward(const BlockAttention& in);
// Gradients of q, then of k and v of each of in.keys, with the forward pass's `in` and softmax.
std::vector<at::Tensor> fused_backward(const BlockAttention& in, const at::Tensor& softmax_2BHNb,
                                       const at::Tensor& d_out_BHNbD);

}  // namespace birkhoff
