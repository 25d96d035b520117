// The launches of the tensor-core kernels of attention over gathered rows for head dims up to
// kHeadDim. Each kHeadDim has its own .cu file, for compile time. gpu_forward.h and gpu_backward.h
// describe what the kernels compute, own and keep in shared memory.
#pragma once

#include "attention/kernels/gathered_attention/tiles/gpu_kernels.h"
#include "attention/kernels/tile_attention/gpu_launch.cuh"

namespace birkhoff {

template <int kHeadDim>
void launch_gathered_tiles(const GatheredParams& params, cudaStream_t stream) {
  with_16_bit_type(params.dtype, [&]<typename T>() {
    with_forward_tiles<GpuThread<T>, kHeadDim>(
        params, [&]<typename Body>() { launch_body<Body>(params, stream); });
  });
}
template <int kHeadDim>
void launch_gathered_tiles_backward(const GatheredParams& params, cudaStream_t stream) {
  with_16_bit_type(params.dtype, [&]<typename T>() {
    for_each_backward_tiles<GpuThread<T>, kHeadDim>(
        params, [&]<typename Body>() { launch_body<Body>(params, stream); });
  });
}

}  // namespace birkhoff
