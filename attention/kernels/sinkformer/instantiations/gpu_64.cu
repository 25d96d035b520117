// Doubly stochastic attention for head dims up to 64.
#include "attention/kernels/sinkformer/gpu_launch.cuh"

namespace birkhoff {

template void launch_sinkformer_of<64>(const SinkformerParams&, cudaStream_t);
template void launch_sinkformer_backward_of<64>(const SinkformerParams&, cudaStream_t);

}  // namespace birkhoff
