// The conversion of tensors to arguments of the GPU's block-attention kernels (gpu_params.h).
// Legend: B batch, H heads, N blocks, b tokens per block, D head dim.
#pragma once

#include <string>

#include "attention/kernels/block_attention/gpu_params.h"
#include "attention/kernels/block_attention/gpu_terms.h"
#include "attention/kernels/block_attention/operands.h"
#include "attention/kernels/common/fitting_rows.h"

namespace birkhoff {

// Why the kernels do not support this, regardless of where its tensors are; empty if they do. They
// support bf16 or fp16, blocks of at least 16 (64-row tiles would be mostly empty), D of at most
// 256, few key sources, a bias only on keys of a query's own block and the same for all of its
// queries, and relative positions of one source of each softmax.
std::string why_not_gpu_kernels(const BlockAttention& in);

// The rows of x in the form that kernels take. Error(kInternal) unless they are aligned.
BlockRowsParams block_rows(const at::Tensor& x_BHNbD);

// The kernels' arguments for the forward pass. Rows of operands and results must be aligned, with a
// multiple of 8 columns; all tensors must outlive the launch.
BlockAttentionParams block_attention_params(const BlockOperands& operands,
                                            const BlockResults& results,
                                            const DistanceTerms& terms);
// The same for the backward pass, which writes delta_BHNb (fp32).
BlockAttentionParams block_attention_params(
    const BlockOperands& operands, const BlockResults& results, const at::Tensor& d_out_BHNbD,
    const at::Tensor& delta_BHNb, const DistanceTerms& terms, const BlockGradients& gradients);

}  // namespace birkhoff
