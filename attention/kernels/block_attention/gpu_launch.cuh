// The launches of the block-attention kernels for head dims up to kHeadDim. Each kHeadDim has its
// own .cu file, for compile time. gpu_forward.h and gpu_backward.h describe what the kernels
// compute and own.
#pragma once

#include "attention/kernels/block_attention/gpu_forward.h"
#include "attention/kernels/block_attention/gpu_kernels.h"
#include "cluster/base/gpu/gpu_thread.cuh"
#include "cluster/base/gpu/launch.h"

namespace birkhoff {

// Body::kThreadBlocks is the number of thread blocks that a multiprocessor should run at once,
// which bounds their registers. More than one only where the compiler then spills no registers. It
// is always given: without it the compiler would spill registers to fit more thread blocks.
template <typename Body>
__global__ void __launch_bounds__(Body::kThreads, Body::kThreadBlocks)
    block_attention_kernel(const __grid_constant__ BlockAttentionParams p) {
  Body({}, p).run();
}

template <typename Body>
void launch_block_attention_body(const BlockAttentionParams& params, cudaStream_t stream) {
  const std::int64_t num_tasks = Body::num_tasks(params);
  if (num_tasks == 0) return;
  const auto kernel = block_attention_kernel<Body>;
  cuda_check(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Body::kSharedBytes),
      "cudaFuncSetAttribute");
  launch({.grid = dim3(static_cast<unsigned>(num_tasks)),
          .block = dim3(Body::kThreads),
          .stream = stream,
          .shared_bytes = Body::kSharedBytes},
         kernel, params);
}

template <int kHeadDim, typename T>
void launch_forward(const BlockAttentionParams& params, cudaStream_t stream) {
  launch_block_attention_body<BlockAttentionForward<GpuThread<T>, kHeadDim>>(params, stream);
}

template <int kHeadDim, typename T>
void launch_backward(const BlockAttentionParams& params, cudaStream_t stream) {
  for_each_backward_kernel<GpuThread<T>, kHeadDim>(
      params, [&]<typename Body>() { launch_block_attention_body<Body>(params, stream); });
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
