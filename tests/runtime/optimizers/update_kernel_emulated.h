// The GPU kernel that updates a flat bucket, run on the CPU. See tests/emulated_cuda.
#pragma once

#include "runtime/optimizers/gpu_fused_update_params.h"

namespace birkhoff {

void emulate_fused_update(const FusedUpdateParams<AdamWRule>& params);
void emulate_fused_update(const FusedUpdateParams<SgdRule>& params);

}  // namespace birkhoff
