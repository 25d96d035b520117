// The GPU kernels for residual addition and layer norm, run on the CPU. See tests/emulated_cuda.
#pragma once

#include "models/transformer/gpu_residual_norm_params.h"

namespace birkhoff {

void emulate_residual_norm(const ResidualNormParams& params);
void emulate_residual_norm_backward(const ResidualNormBackwardParams& params);

}  // namespace birkhoff
