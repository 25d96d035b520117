// The GPU kernels of block pooling, run on the CPU by tests/emulated_cuda.
#pragma once

#include "attention/kernels/block_pool/gpu_params.h"

namespace birkhoff {

void emulate_block_pool(const BlockPoolParams& params);
void emulate_block_pool_backward(const BlockPoolParams& params);

}  // namespace birkhoff
