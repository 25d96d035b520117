// The launches of the tensor-core kernels of attention over gathered rows for head dims up to
// kHeadDim. Each kHeadDim has its own .cu file, for compile time.
#pragma once

#include "attention/kernels/gathered_attention/tiles/gpu_backward.h"
#include "attention/kernels/gathered_attention/tiles/gpu_forward.h"
#include "attention/kernels/tile_attention/gpu_launch.cuh"

namespace birkhoff {

template <int kHeadDim>
void launch_forward_of(const GatheredParams& params, cudaStream_t stream) {
  with_16_bit_type(params.dtype, [&]<typename T>() {
    launch_body<GatheredTilesForward<GpuThread<T>, kHeadDim>>(params, stream);
  });
}
template <int kHeadDim>
void launch_backward_of(const GatheredParams& params, cudaStream_t stream) {
  with_16_bit_type(params.dtype, [&]<typename T>() {
    launch_body<GatheredTilesQueries<GpuThread<T>, kHeadDim>>(params, stream);
    launch_body<GatheredTilesKeys<GpuThread<T>, kHeadDim>>(params, stream);
  });
}

}  // namespace birkhoff
