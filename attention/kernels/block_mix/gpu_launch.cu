// Block mixing: launches. gpu_products.h and gpu_few_blocks.h describe what the kernels compute,
// own and keep in shared memory.
#include "attention/kernels/block_mix/gpu_few_blocks.h"
#include "attention/kernels/tile_attention/gpu_launch.cuh"

namespace birkhoff {
namespace {

template <bool kBackward>
void launch_pass(const BlockMixParams& params, cudaStream_t stream) {
  with_16_bit_type(params.dtype, [&]<typename T>() {
    for_each_mix_kernel<GpuThread<T>, kBackward>(params, [&]<typename Body>(int shared_bytes) {
      launch_body<Body>(params, stream, shared_bytes);
    });
  });
}

}  // namespace

void launch_block_mix(const BlockMixParams& params, cudaStream_t stream) {
  launch_pass<false>(params, stream);
}

void launch_block_mix_backward(const BlockMixParams& params, cudaStream_t stream) {
  launch_pass<true>(params, stream);
}

}  // namespace birkhoff
