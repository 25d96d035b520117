// The GPU kernels of the fused cross entropy, run on the CPU. See tests/emulated_cuda.
#include "tests/models/cross_entropy_emulated.h"

#define launch_fused_cross_entropy emulate_launch_fused_cross_entropy
#define launch_scale emulate_launch_scale
#include "models/losses/gpu_cross_entropy.cu"

namespace birkhoff {
namespace {

Vector<float, 4> cross_entropy_memory[232448 / sizeof(Vector<float, 4>)];

}  // namespace

void emulate_fused_cross_entropy(const FusedCrossEntropyParams& params, int shared_limit) {
  const emulated::SharedLimit limit(shared_limit);
  emulate_launch_fused_cross_entropy(params, nullptr);
}

void emulate_scale(const ScaleParams& params) { emulate_launch_scale(params, nullptr); }

}  // namespace birkhoff
