// Block mixing: launches. gpu_products.h and gpu_few_blocks.h describe what the kernels compute,
// own and keep in shared memory.
#include "attention/kernels/block_mix/gpu_few_blocks.h"
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

template <typename T, bool kBackward>
void launch_few(const BlockMixParams& params, cudaStream_t stream) {
  const auto launch_rows = [&]<int kRows>() {
    using Body = BlockMixFew<GpuThread<T>, kBackward, kRows>;
    launch_body<Body>(params, BlockMixShape::few_tasks(params, kBackward), Body::kBytes, stream);
  };
  switch (BlockMixShape::few_rows(params.blocks)) {
    case 16:
      return launch_rows.template operator()<16>();
    case 32:
      return launch_rows.template operator()<32>();
    default:
      return launch_rows.template operator()<64>();
  }
}

template <typename T>
void launch_forward(const BlockMixParams& params, cudaStream_t stream) {
  using Shape = BlockMixShape;
  if (params.blocks <= Shape::kFewBlocks) return launch_few<T, false>(params, stream);
  launch_body<BlockMixRows<GpuThread<T>, false>>(params, Shape::rows_tasks(params),
                                                 Shape::rows_bytes(params.blocks), stream);
}

template <typename T>
void launch_backward(const BlockMixParams& params, cudaStream_t stream) {
  using Shape = BlockMixShape;
  if (params.blocks <= Shape::kFewBlocks) return launch_few<T, true>(params, stream);
  launch_body<BlockMixRows<GpuThread<T>, true>>(params, Shape::rows_tasks(params),
                                                Shape::rows_bytes(params.blocks), stream);
  launch_body<BlockMixWeights<GpuThread<T>>>(params, Shape::weights_tasks(params),
                                             Shape::kWeightsBytes, stream);
}

}  // namespace

void launch_block_mix(const BlockMixParams& params, cudaStream_t stream) {
  if (params.dtype == KernelDtype::kHalf) return launch_forward<__half>(params, stream);
  launch_forward<__nv_bfloat16>(params, stream);
}

void launch_block_mix_backward(const BlockMixParams& params, cudaStream_t stream) {
  if (params.dtype == KernelDtype::kHalf) return launch_backward<__half>(params, stream);
  launch_backward<__nv_bfloat16>(params, stream);
}

}  // namespace birkhoff
