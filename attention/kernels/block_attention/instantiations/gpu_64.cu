// Block attention for head dims up to 64.
#include "attention/kernels/block_attention/gpu_launch.cuh"

namespace birkhoff {

template void launch_forward_of<64>(const BlockAttentionParams&, cudaStream_t);
template void launch_backward_of<64>(const BlockAttentionParams&, cudaStream_t);

}  // namespace birkhoff
