// The GPU kernels of attention over gathered rows, run on the CPU by tests/emulated_cuda.
#pragma once

#include "attention/kernels/gathered_attention/gpu_params.h"

namespace birkhoff {

void emulate_gathered_attention(const GatheredParams& params);
void emulate_gathered_attention_backward(const GatheredParams& params);

}  // namespace birkhoff
