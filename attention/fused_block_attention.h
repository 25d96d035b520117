// Attention in blocks through the kernels of tile_attention.h on the CPU and of
// block_attention_params.h on a GPU: no concatenated keys, no stored probabilities. The same
// results as the reference up to rounding, the same bits each time, for any number of threads.
#pragma once

#include <ATen/core/Tensor.h>

#include "attention/blocks.h"

namespace birkhoff {

// Whether the kernels can do this: on the CPU fp32 or fp64, D <= 256, no bias, no dropout; on a
// GPU what fits_block_attention() says.
bool fits_fused(const BlockAttention& in);

// [B, H, N, b, D], for what fits. Asynchronous on a CUDA device's current stream.
at::Tensor attend_fused(const BlockAttention& in);

}  // namespace birkhoff
