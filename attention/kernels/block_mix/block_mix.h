// Block mixes of a destination's weights that are 0 above a diagonal: what a block sees of earlier
// ones. Legend: B batch, H heads, N blocks, b tokens of a block, D head dim.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "attention/kernels/common/path.h"

namespace birkhoff {

// Block mixes sum_v weights_uv x_v [B, H, U, b, D], for weights [B, H, U, N] and x [B, H, N, b, D].
at::Tensor mix_blocks(const at::Tensor& weights_BHUN, const at::Tensor& x_BHNbD);

struct BlockMixes {
  std::vector<at::Tensor> y_BHNbD;  // laid out as x is
  // x itself, for its uses beside the mix: their gradients then reach x through the mix, whose
  // backward pass adds them to its own where it has a kernel. Autograd would take a pass over
  // memory for that. There are no gradients of gradients.
  std::vector<at::Tensor> x_BHNbD;
};

// For each x [B, H, N, b, D], y_u = sum over v <= u + diagonal of weights_uv x_v, of weights
// rounded to the dtype of x; `diagonal` as of at::tril: -1 for earlier blocks alone, N - 1 for all.
// Weights [B, H, N, N] (B or H may be 1), in the dtype of x or fp32, must be 0 above the diagonal,
// and get no gradient there. Twice as fast as mix_blocks where half of the weights are 0: kernels
// for fp32, fp64 and bf16 on the CPU and for bf16 and fp16 on a GPU (fits_block_mix), sums in fp32
// at least; elsewhere GEMMs of the rows' own widths. Below Path::kFused: mix_blocks of each x.
BlockMixes mix_lower_blocks(const at::Tensor& weights_BHNN, const std::vector<at::Tensor>& x_BHNbD,
                            std::int64_t diagonal, Path limit);

}  // namespace birkhoff
