// The GPU kernel that updates a flat bucket, run on the CPU. See tests/emulated_cuda.
#include "tests/runtime/optimizers/update_kernel_emulated.h"

#define launch_fused_update emulate_launch_fused_update
#include "runtime/optimizers/gpu_fused_update.cu"

namespace birkhoff {
namespace {

float4 update_memory[16];

}  // namespace

void emulate_fused_update(const FusedUpdateParams<AdamWRule>& params) {
  emulate_launch_fused_update(params, nullptr);
}

void emulate_fused_update(const FusedUpdateParams<SgdRule>& params) {
  emulate_launch_fused_update(params, nullptr);
}

}  // namespace birkhoff
