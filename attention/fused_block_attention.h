// Attention in blocks through the kernels of tile_attention.h: no concatenated keys, no stored
// probabilities. The same results as the reference up to rounding, the same bits for any number of
// threads.
#pragma once

#include <ATen/core/Tensor.h>

#include "attention/blocks.h"

namespace birkhoff {

// Whether the kernels can do this: fp32, fp64 or bf16 on the CPU, D <= 256.
bool fits_fused(const BlockAttention& in);

// [B, H, N, b, D], for what fits. Noise is read when this is called.
at::Tensor attend_fused(const BlockAttention& in);

}  // namespace birkhoff
