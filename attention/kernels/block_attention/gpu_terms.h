// The part of relative positions and sinks that LibTorch's operations compute, besides the GPU's
// block-attention kernels (gpu_params.h). Legend: B batch, H heads, N blocks, b tokens per block, D
// head dim.
#pragma once

#include <ATen/core/Tensor.h>

#include "attention/kernels/block_attention/operands.h"
#include "attention/kernels/relative_positions/gpu_terms.h"

namespace birkhoff {

// Relative positions as the kernels take them, for the distances to the keys in place. Undefined
// without a table or such keys.
DistanceTerms forward_terms(const BlockOperands& operands);
DistanceTerms backward_terms(const BlockOperands& operands, const at::Tensor& d_out_BHNbD);

// The rest of the forward pass, after the kernel: adds to results.out_BHNbD.
void add_values(const DistanceTerms& terms, const BlockResults& results);

// The rest of the backward pass, after the kernels. Sets the gradients of tables and of
// operands.sink_H, as far as they are defined, and adds to the gradient of q:
//   d_sink = -sum_i exp(sink - m_i) z_i delta_i
// over all queries i of a head; m, z and delta as in gpu_forward.h and gpu_backward.h.
void add_term_gradients(const BlockOperands& operands, const BlockResults& results,
                        const at::Tensor& d_out_BHNbD, const at::Tensor& delta_BHNb,
                        const DistanceTerms& terms, BlockGradients& gradients);

}  // namespace birkhoff
