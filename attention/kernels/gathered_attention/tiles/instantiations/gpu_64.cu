// Attention over gathered rows for head dims up to 64.
#include "attention/kernels/gathered_attention/tiles/gpu_launch.cuh"

namespace birkhoff {

template void launch_gathered_tiles<64>(const GatheredParams&, cudaStream_t);
template void launch_gathered_tiles_backward<64>(const GatheredParams&, cudaStream_t);

}  // namespace birkhoff
