// The launch of the choice of top-k. gpu_top_k.h describes what the kernel computes.
#include "attention/kernels/row_normalizer/gpu_top_k.h"

#include "attention/kernels/tile_attention/gpu_launch.cuh"

namespace birkhoff {

void launch_top_k_choice(const TopKParams& params, cudaStream_t stream) {
  with_16_bit_type(params.dtype, [&]<typename T>() {
    const auto launch_for = [&]<int kHeadDim>() {
      using Body = TopKChoice<GpuThread<T>, kHeadDim>;
      launch_body<Body>(params, stream, Body::shared_bytes(params));
    };
    if (params.head_dim <= 64) return launch_for.template operator()<64>();
    launch_for.template operator()<128>();
  });
}

}  // namespace birkhoff
