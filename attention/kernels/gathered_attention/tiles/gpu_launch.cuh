// The launches of the tensor-core kernels of attention over gathered rows for head dims up to
// kHeadDim. Each kHeadDim has its own .cu file, for compile time. gpu_forward.h and gpu_backward.h
// describe what the kernels compute, own and keep in shared memory.
#pragma once

#include "attention/kernels/gathered_attention/tiles/gpu_backward.h"
#include "attention/kernels/gathered_attention/tiles/gpu_forward.h"
#include "attention/kernels/tile_attention/gpu_launch.cuh"

namespace birkhoff {

template <int kHeadDim>
void launch_gathered_tiles(const GatheredParams& params, cudaStream_t stream) {
  with_16_bit_type(params.dtype, [&]<typename T>() {
    launch_body<GatheredTilesForward<GpuThread<T>, kHeadDim>>(params, stream);
  });
}
template <int kHeadDim>
void launch_gathered_tiles_backward(const GatheredParams& params, cudaStream_t stream) {
  with_16_bit_type(params.dtype, [&]<typename T>() {
    launch_body<GatheredTilesQueries<GpuThread<T>, kHeadDim>>(params, stream);
    launch_body<GatheredTilesKeys<GpuThread<T>, kHeadDim>>(params, stream);
  });
}

}  // namespace birkhoff
