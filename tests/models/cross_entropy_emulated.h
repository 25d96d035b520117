// The GPU kernels of the fused cross entropy, run by the processor: tests/emulated_cuda.
#pragma once

#include "models/losses/gpu_cross_entropy_params.h"

namespace birkhoff {

// shared_limit: most bytes of shared memory that a block may have.
void emulate_fused_cross_entropy(const FusedCrossEntropyParams& params, int shared_limit);
void emulate_scale(const ScaleParams& params);

}  // namespace birkhoff
