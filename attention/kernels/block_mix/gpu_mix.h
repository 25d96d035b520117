// From tensors to the kernels of block mixing on a GPU (gpu_params.h). Legend: B batch, H
// heads, N blocks, b tokens of a block, D head dim.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "attention/kernels/block_mix/block_mix.h"
#include "attention/kernels/block_mix/gpu_params.h"

namespace birkhoff {

// Whether the kernels can mix these, wherever they live: one or two tensors in bf16 or fp16, up to
// BlockMixParams::kMostBlocks blocks, D a multiple of 8.
bool fits_block_mix(const std::vector<at::Tensor>& x_BHNbD);

// mix_lower_blocks() of what fits, on a GPU, with diagonal in [-N, N): sums in fp32, and so are the
// weights' gradients where weights are.
BlockMixes mix_on_gpu(const at::Tensor& weights_BHNN, const std::vector<at::Tensor>& x_BHNbD,
                      std::int64_t diagonal);

// ---- What it is made of, for tests.

// Weights [B, H, N, N] as the kernels take them: rounded to `dtype`, rows aligned and padded.
at::Tensor block_mix_weights(const at::Tensor& weights_BHNN, at::ScalarType dtype);

// The kernels' arguments, for weights of block_mix_weights(). Rows of all x and y are aligned; all
// tensors must outlive the launch.
BlockMixParams block_mix_params(const at::Tensor& weights, const std::vector<at::Tensor>& x_BHNbD,
                                const std::vector<at::Tensor>& y_BHNbD, std::int64_t diagonal);

// The same for gradients. `others`: what is added to d_x; undefined: nothing. d_weights:
// new_block_mix_d_weights() of the same x.
BlockMixParams block_mix_params(const at::Tensor& weights, const std::vector<at::Tensor>& x_BHNbD,
                                const std::vector<at::Tensor>& d_y_BHNbD,
                                const std::vector<at::Tensor>& others_BHNbD,
                                const std::vector<at::Tensor>& d_x_BHNbD,
                                const at::Tensor& d_weights, std::int64_t diagonal);

// fp32 [parts, B, H, N, N], unset: the sum over parts is the gradient. Their number follows from
// the sizes alone.
at::Tensor new_block_mix_d_weights(const std::vector<at::Tensor>& x_BHNbD);

}  // namespace birkhoff
