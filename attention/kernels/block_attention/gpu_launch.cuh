// Launches the block-attention kernels for head dims up to kHeadDim. Each kHeadDim has its own .cu
// file, for compile time. gpu_forward.h and gpu_backward.h say what the kernels compute and own.
#pragma once

#include "attention/kernels/block_attention/gpu_backward.h"
#include "attention/kernels/block_attention/gpu_forward.h"
#include "cluster/base/gpu/gpu_thread.cuh"
#include "cluster/base/gpu/launch.h"

namespace birkhoff {

// kBlocks is always given: without it the compiler would spill registers to fit more blocks.
template <typename Body, int kThreads, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks)
    block_attention_kernel(const __grid_constant__ BlockAttentionParams p) {
  Body({}, p).run();
}

template <typename Body, int kThreads, int kBlocks>
void launch_block_attention_body(const BlockAttentionParams& params, int shared_bytes,
                                 cudaStream_t stream) {
  const std::int64_t num_tasks = Body::num_tasks(params);
  if (num_tasks == 0) return;
  const auto kernel = block_attention_kernel<Body, kThreads, kBlocks>;
  cuda_check(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
      "cudaFuncSetAttribute");
  launch({.grid = dim3(static_cast<unsigned>(num_tasks)),
          .block = dim3(kThreads),
          .stream = stream,
          .shared_bytes = static_cast<std::size_t>(shared_bytes)},
         kernel, params);
}

template <int kHeadDim, typename T>
void launch_forward(const BlockAttentionParams& params, cudaStream_t stream) {
  using Shape = BlockAttentionShape<kHeadDim>;
  launch_block_attention_body<BlockAttentionForward<GpuThread<T>, kHeadDim>, Shape::kThreads,
                              Shape::kForwardBlocks>(params, Shape::kForwardBytes, stream);
}

template <int kHeadDim, typename T>
void launch_backward(const BlockAttentionParams& params, cudaStream_t stream) {
  using Shape = BlockAttentionShape<kHeadDim>;
  if (params.owns_keys()) {
    return launch_block_attention_body<BlockAttentionBackwardQueries<GpuThread<T>, kHeadDim, true>,
                                       Shape::kThreads, Shape::kQueriesBlocks>(
        params, Shape::kQueriesBytes, stream);
  }
  launch_block_attention_body<BlockAttentionBackwardQueries<GpuThread<T>, kHeadDim, false>,
                              Shape::kThreads, Shape::kQueriesBlocks>(params, Shape::kQueriesBytes,
                                                                      stream);
  launch_block_attention_body<BlockAttentionBackwardKeys<GpuThread<T>, kHeadDim>, Shape::kThreads,
                              Shape::kKeysBlocks>(params, Shape::kKeysBytes, stream);
}

template <int kHeadDim>
void launch_forward_of(const BlockAttentionParams& params, cudaStream_t stream) {
  if (params.dtype == KernelDtype::kHalf) return launch_forward<kHeadDim, __half>(params, stream);
  launch_forward<kHeadDim, __nv_bfloat16>(params, stream);
}
template <int kHeadDim>
void launch_backward_of(const BlockAttentionParams& params, cudaStream_t stream) {
  if (params.dtype == KernelDtype::kHalf) return launch_backward<kHeadDim, __half>(params, stream);
  launch_backward<kHeadDim, __nv_bfloat16>(params, stream);
}

extern template void launch_forward_of<64>(const BlockAttentionParams&, cudaStream_t);
extern template void launch_forward_of<128>(const BlockAttentionParams&, cudaStream_t);
extern template void launch_forward_of<256>(const BlockAttentionParams&, cudaStream_t);
extern template void launch_backward_of<64>(const BlockAttentionParams&, cudaStream_t);
extern template void launch_backward_of<128>(const BlockAttentionParams&, cudaStream_t);
extern template void launch_backward_of<256>(const BlockAttentionParams&, cudaStream_t);

}  // namespace birkhoff
