// Chooses the block-attention kernels by head dim. gpu_forward.h and gpu_backward.h describe what
// they compute, own and keep in shared memory.
#include "attention/kernels/block_attention/gpu_launch.cuh"

namespace birkhoff {

void launch_block_attention(const BlockAttentionParams& params, cudaStream_t stream) {
  if (params.head_dim <= 64) return launch_forward_of<64>(params, stream);
  if (params.head_dim <= 128) return launch_forward_of<128>(params, stream);
  launch_forward_of<256>(params, stream);
}

void launch_block_attention_backward(const BlockAttentionParams& params, cudaStream_t stream) {
  if (params.head_dim <= 64) return launch_backward_of<64>(params, stream);
  if (params.head_dim <= 128) return launch_backward_of<128>(params, stream);
  launch_backward_of<256>(params, stream);
}

}  // namespace birkhoff
