// What relative positions and sinks need besides the GPU's block-attention kernels (gpu_params.h),
// in LibTorch's operations. Legend: B batch, H heads, N blocks, b tokens per block.
#pragma once

#include <ATen/core/Tensor.h>

#include "attention/kernels/block_attention/operands.h"

namespace birkhoff {

// The gradient of operands.sink_H [H], s, after the kernels' backward pass, which wrote `delta`:
//   d_s = -sum_i exp(s - m_i) z_i delta_i
// over all queries i of a head; m, z and delta as in gpu_forward.h and gpu_backward.h.
at::Tensor sink_gradient(const BlockOperands& operands, const BlockResults& results,
                         const at::Tensor& delta_BHNb);

}  // namespace birkhoff
