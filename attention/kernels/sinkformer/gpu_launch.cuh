// The launches of the kernels of doubly stochastic attention for head dims up to kHeadDim. Each
// kHeadDim has its own .cu file, for compile time. gpu_forward.h and gpu_backward.h describe what
// the kernels compute, own and keep in shared memory.
#pragma once

#include "attention/kernels/sinkformer/gpu_kernels.h"
#include "attention/kernels/tile_attention/gpu_launch.cuh"

namespace birkhoff {

template <int kHeadDim>
void launch_sinkformer_of(const SinkformerParams& params, cudaStream_t stream) {
  with_16_bit_type(params.dtype, [&]<typename T>() {
    for_each_sinkformer_kernel<GpuThread<T>, kHeadDim>(
        params, [&]<typename Body>(const SinkformerParams& p) { launch_body<Body>(p, stream); });
  });
}
template <int kHeadDim>
void launch_sinkformer_backward_of(const SinkformerParams& params, cudaStream_t stream) {
  with_16_bit_type(params.dtype, [&]<typename T>() {
    for_each_sinkformer_backward_kernel<GpuThread<T>, kHeadDim>(
        params, [&]<typename Body>(const SinkformerParams& p) { launch_body<Body>(p, stream); });
  });
}

}  // namespace birkhoff
