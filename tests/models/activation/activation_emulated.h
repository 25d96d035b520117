// The GPU kernels for activations, run on the CPU. See tests/emulated_cuda.
#pragma once

#include "models/transformer/activation/gpu_activation_params.h"

namespace birkhoff {

void emulate_activation(const ActivationParams& params);
void emulate_activation_backward(const ActivationParams& params);

}  // namespace birkhoff
