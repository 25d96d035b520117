// Block mixing: launches. gpu_products.h says what the kernels compute, own and keep in shared
// memory.
#include "attention/kernels/block_mix/gpu_products.h"
#include "cluster/base/gpu/gpu_thread.cuh"
#include "cluster/base/gpu/launch.h"

namespace birkhoff {
namespace {

template <typename Body>
__global__ void __launch_bounds__(BlockMixShape::kThreads, Body::kBlocks)
    block_mix_kernel(const __grid_constant__ BlockMixParams p) {
  Body({}, p).run();
}

template <typename Body>
void launch_body(const BlockMixParams& params, std::int64_t num_tasks, int shared_bytes,
                 cudaStream_t stream) {
  if (num_tasks == 0) return;
  const auto kernel = block_mix_kernel<Body>;
  cuda_check(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
      "cudaFuncSetAttribute");
  launch({.grid = dim3(static_cast<unsigned>(num_tasks)),
          .block = dim3(BlockMixShape::kThreads),
          .stream = stream,
          .shared_bytes = static_cast<std::size_t>(shared_bytes)},
         kernel, params);
}

template <typename T, bool kTransposed>
void launch_rows(const BlockMixParams& params, cudaStream_t stream) {
  using Shape = BlockMixShape;
  const auto launch_with = [&]<int kResultRows>() {
    launch_body<BlockMixRows<GpuThread<T>, kTransposed, kResultRows>>(
        params, Shape::rows_tasks(params), Shape::rows_bytes(params.blocks), stream);
  };
  if (params.blocks <= Shape::kFewBlocks) {
    return launch_with.template operator()<Shape::kFewBlocks>();
  }
  launch_with.template operator()<Shape::kTile>();
}

template <typename T>
void launch_backward(const BlockMixParams& params, cudaStream_t stream) {
  launch_rows<T, true>(params, stream);
  launch_body<BlockMixWeights<GpuThread<T>>>(params, BlockMixShape::weights_tasks(params),
                                             BlockMixShape::kWeightsBytes, stream);
}

}  // namespace

void launch_block_mix(const BlockMixParams& params, cudaStream_t stream) {
  if (params.dtype == KernelDtype::kHalf) return launch_rows<__half, false>(params, stream);
  launch_rows<__nv_bfloat16, false>(params, stream);
}

void launch_block_mix_backward(const BlockMixParams& params, cudaStream_t stream) {
  if (params.dtype == KernelDtype::kHalf) return launch_backward<__half>(params, stream);
  launch_backward<__nv_bfloat16>(params, stream);
}

}  // namespace birkhoff
