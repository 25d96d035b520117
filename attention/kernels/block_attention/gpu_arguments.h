// From tensors to the kernels of attention in blocks on a GPU (gpu_params.h). Legend: B
// batch, H heads, N blocks, b tokens of a block, D head dim.
#pragma once

#include "attention/kernels/block_attention/gpu_params.h"
#include "attention/kernels/block_attention/operands.h"

namespace birkhoff {

// Whether the kernels can do this, wherever its tensors live: bf16 or fp16, blocks of at least 16
// (tiles of 64 rows would be all but empty), D a multiple of 8 and at most 256, few key sources, a
// bias alone on keys of a query's own block and alike for all of its queries.
bool fits_gpu_kernels(const BlockAttention& in);

// x, or a copy whose rows can be moved 16 bytes at a time.
at::Tensor with_aligned_rows(const at::Tensor& x_BHNbD);

// Rows as kernels take them: aligned, else Error(kInternal).
BlockRowsParams block_rows(const at::Tensor& x_BHNbD);

// The kernels' arguments. Rows of operands and results are aligned; all tensors must outlive the
// launch.
BlockAttentionParams block_attention_params(const BlockOperands& operands,
                                            const BlockResults& results);
// The same for gradients; delta_BHNb: fp32 scratch.
BlockAttentionParams block_attention_params(const BlockOperands& operands,
                                            const BlockResults& results,
                                            const at::Tensor& d_out_BHNbD,
                                            const at::Tensor& delta_BHNb,
                                            const BlockGradients& gradients);

}  // namespace birkhoff
