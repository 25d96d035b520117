// Attention in blocks through the kernels of tile_attention.h on the CPU and of
// block_attention_params.h on a GPU: no concatenated keys, no stored probabilities. The same
// results as the reference up to rounding, the same bits each time, for any number of threads.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "attention/block_operands.h"
#include "attention/blocks.h"

namespace birkhoff {

// Whether the kernels can do this: on the CPU fp32, fp64 or bf16, D <= 256; on a GPU what
// fits_block_attention() says.
bool fits_fused(const BlockAttention& in);

// [B, H, N, b, D], for what fits. Asynchronous on a CUDA device's current stream; on the CPU noise
// is read when this is called.
at::Tensor attend_fused(const BlockAttention& in);

// The two passes of attend_fused, with one softmax, for who keeps by himself what lies between
// them.
BlockResults fused_forward(const BlockAttention& in);
// Gradients of q, then of k and v of each of in.keys, then of the biases that there are (of 5
// dims), given the forward pass's `in` and results.
std::vector<at::Tensor> fused_backward(const BlockAttention& in, const BlockResults& results,
                                       const at::Tensor& d_out_BHNbD);

}  // namespace birkhoff
