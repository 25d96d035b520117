// Attention in blocks for head dims up to 256.
#include "attention/block_attention_kernels.cuh"

namespace birkhoff {

template void launch_forward_of<256>(const BlockAttentionParams&, cudaStream_t);
template void launch_backward_of<256>(const BlockAttentionParams&, cudaStream_t);

}  // namespace birkhoff
