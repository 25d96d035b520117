// Block attention for head dims up to 256.
#include "attention/kernels/block_attention/gpu_launch.cuh"

namespace birkhoff {

template void launch_forward_of<256>(const BlockAttentionParams&, cudaStream_t);
template void launch_backward_of<256>(const BlockAttentionParams&, cudaStream_t);

}  // namespace birkhoff
