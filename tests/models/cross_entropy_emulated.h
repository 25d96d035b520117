// The GPU kernels of the fused cross entropy, run on the CPU. See tests/emulated_cuda.
#pragma once

#include "models/losses/gpu_cross_entropy_params.h"

namespace birkhoff {

// shared_limit: the maximum number of bytes of shared memory of a block.
void emulate_fused_cross_entropy(const FusedCrossEntropyParams& params, int shared_limit);
void emulate_scale(const ScaleParams& params);

}  // namespace birkhoff
