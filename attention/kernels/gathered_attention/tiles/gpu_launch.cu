// Chooses the tensor-core kernels of attention over gathered rows by head dim. gpu_forward.h and
// gpu_backward.h describe what they compute, own and keep in shared memory.
#include "attention/kernels/gathered_attention/tiles/gpu_launch.cuh"

namespace birkhoff {

void launch_gathered_tiles(const GatheredParams& params, cudaStream_t stream) {
  if (params.head_dim <= 64) return launch_gathered_forward_of<64>(params, stream);
  if (params.head_dim <= 128) return launch_gathered_forward_of<128>(params, stream);
  launch_gathered_forward_of<256>(params, stream);
}

void launch_gathered_tiles_backward(const GatheredParams& params, cudaStream_t stream) {
  if (params.head_dim <= 64) return launch_gathered_backward_of<64>(params, stream);
  if (params.head_dim <= 128) return launch_gathered_backward_of<128>(params, stream);
  launch_gathered_backward_of<256>(params, stream);
}

}  // namespace birkhoff
