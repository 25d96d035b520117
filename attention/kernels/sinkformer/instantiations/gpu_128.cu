// Doubly stochastic attention for head dims up to 128.
#include "attention/kernels/sinkformer/gpu_launch.cuh"

namespace birkhoff {

template void launch_sinkformer_of<128>(const SinkformerParams&, cudaStream_t);
template void launch_sinkformer_backward_of<128>(const SinkformerParams&, cudaStream_t);

}  // namespace birkhoff
