// The GPU kernels of attention over gathered rows, run on the CPU by tests/emulated_cuda.
#include "tests/attention/gathered_emulated.h"

#define launch_gathered_attention emulate_launch_gathered_attention
#define launch_gathered_attention_backward emulate_launch_gathered_attention_backward
#include "attention/kernels/gathered_attention/gpu_gathered.cu"

namespace birkhoff {

float4 gathered_memory[232448 / sizeof(float4)];

void emulate_gathered_attention(const GatheredParams& params) {
  emulate_launch_gathered_attention(params, nullptr);
}

void emulate_gathered_attention_backward(const GatheredParams& params) {
  emulate_launch_gathered_attention_backward(params, nullptr);
}

}  // namespace birkhoff
