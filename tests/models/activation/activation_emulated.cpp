#include "tests/models/activation/activation_emulated.h"

#include "cluster/base/gpu/launch.h"

// The kernels' arrays of a fixed size. Blocks run one after another, so they may share them.
#undef __shared__
#define __shared__ static
#define launch_activation emulate_launch_activation
#define launch_activation_backward emulate_launch_activation_backward
#include "models/transformer/activation/gpu_activation.cu"

namespace birkhoff {

void emulate_activation(const ActivationParams& params) {
  emulate_launch_activation(params, nullptr);
}

void emulate_activation_backward(const ActivationParams& params) {
  emulate_launch_activation_backward(params, nullptr);
}

}  // namespace birkhoff
