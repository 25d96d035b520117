// The GPU kernels for residual addition and layer norm, run on the CPU. See tests/emulated_cuda.
#include "tests/models/residual_norm/norm_emulated.h"

#include "cluster/base/gpu/launch.h"

// The kernels' arrays of a fixed size. Blocks run one after another, so they may share them.
#undef __shared__
#define __shared__ static
#define launch_residual_norm emulate_launch_residual_norm
#define launch_residual_norm_backward emulate_launch_residual_norm_backward
#include "models/transformer/gpu_residual_norm.cu"

namespace birkhoff {

void emulate_residual_norm(const ResidualNormParams& params) {
  emulate_launch_residual_norm(params, nullptr);
}

void emulate_residual_norm_backward(const ResidualNormBackwardParams& params) {
  emulate_launch_residual_norm_backward(params, nullptr);
}

}  // namespace birkhoff
