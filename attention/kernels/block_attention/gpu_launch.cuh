// The launches of the block-attention kernels for head dims up to kHeadDim. Each kHeadDim has its
// own .cu file, for compile time. gpu_forward.h and gpu_backward.h describe what the kernels
// compute, own and keep in shared memory.
#pragma once

#include "attention/kernels/block_attention/gpu_kernels.h"
#include "attention/kernels/tile_attention/gpu_launch.cuh"

namespace birkhoff {

template <int kHeadDim>
void launch_forward_of(const BlockAttentionParams& params, cudaStream_t stream) {
  with_16_bit_type(params.dtype, [&]<typename T>() {
    with_forward_kernel<GpuThread<T>, kHeadDim>(
        params, [&]<typename Body>() { launch_body<Body>(params, stream); });
  });
}
template <int kHeadDim>
void launch_backward_of(const BlockAttentionParams& params, cudaStream_t stream) {
  with_16_bit_type(params.dtype, [&]<typename T>() {
    for_each_backward_kernel<GpuThread<T>, kHeadDim>(
        params, [&]<typename Body>() { launch_body<Body>(params, stream); });
  });
}

}  // namespace birkhoff
