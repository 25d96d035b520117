// Block mixing of tensors by the GPU kernels (gpu_params.h). Legend: B batch, H heads, N blocks, b
// tokens of a block, D head dim.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "attention/kernels/block_mix/block_mix.h"
#include "attention/kernels/block_mix/gpu_params.h"

namespace birkhoff {

// Why the kernels cannot mix these tensors, whatever their device; empty if they can. They take one
// or two in bf16 or fp16, with at most BlockMixParams::kMaxBlocks blocks and D a multiple of 8.
std::string why_not_gpu_kernels(const std::vector<at::Tensor>& x_BHNbD);

// mix_lower_blocks() on a GPU, for tensors that the kernels can mix and diagonal in [-N, N). Sums
// are fp32, and so are the gradients of fp32 weights.
BlockMixes mix_on_gpu(const at::Tensor& weights_BHNN, const std::vector<at::Tensor>& x_BHNbD,
                      std::int64_t diagonal, const at::Tensor& rounded, const MixPadding& padding);

// ---- Its parts, for tests. S is the number of sets of weights: 1, or 2 with padding.

// Weights [.., N, N] as the kernels take them: rounded to `dtype`, with aligned and padded rows.
at::Tensor block_mix_weights(const at::Tensor& weights, at::ScalarType dtype);

// What all passes read: weights [S, B, H, N, N] from block_mix_weights(), and the lengths of
// MixPadding with two sets.
struct MixOperands {
  at::Tensor weights, lengths_B;
  std::vector<at::Tensor> x_BHNbD;
  std::int64_t diagonal;
};

// The kernels' arguments. Rows of all x and y must be aligned, and all tensors must outlive the
// launch.
BlockMixParams block_mix_params(const MixOperands& operands,
                                const std::vector<at::Tensor>& y_BHNbD);

// The same for gradients. `others` are added to d_x; an undefined one adds nothing. d_weights comes
// from new_block_mix_d_weights() for the same operands.
BlockMixParams block_mix_params(const MixOperands& operands,
                                const std::vector<at::Tensor>& d_y_BHNbD,
                                const std::vector<at::Tensor>& others_BHNbD,
                                const std::vector<at::Tensor>& d_x_BHNbD,
                                const at::Tensor& d_weights);

// fp32 [S, parts, B, H, N, N], uninitialized; the sum over parts is the gradient. The number of
// parts depends only on the sizes.
at::Tensor new_block_mix_d_weights(const MixOperands& operands);

}  // namespace birkhoff
