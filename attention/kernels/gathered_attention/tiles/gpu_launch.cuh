// The launches of the tensor-core kernels of attention over gathered rows for head dims up to
// kHeadDim. Each kHeadDim has its own .cu file, for compile time.
#pragma once

#include "attention/kernels/gathered_attention/tiles/gpu_backward.h"
#include "attention/kernels/gathered_attention/tiles/gpu_forward.h"
#include "cluster/base/gpu/gpu_thread.cuh"
#include "cluster/base/gpu/launch.h"

namespace birkhoff {

template <typename Body, int kThreads, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks)
    gathered_tiles_kernel(const __grid_constant__ GatheredParams p) {
  Body({}, p).run();
}

template <typename Body, int kThreads, int kBlocks>
void launch_gathered_body(const GatheredParams& params, int shared_bytes, cudaStream_t stream) {
  const std::int64_t num_tasks = Body::num_tasks(params);
  if (num_tasks == 0) return;
  const auto kernel = gathered_tiles_kernel<Body, kThreads, kBlocks>;
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
void launch_gathered_forward(const GatheredParams& params, cudaStream_t stream) {
  using Shape = GatheredTilesShape<kHeadDim>;
  launch_gathered_body<GatheredTilesForward<GpuThread<T>, kHeadDim>, Shape::kThreads,
                       Shape::kForwardBlocks>(params, Shape::kForwardBytes, stream);
}
template <int kHeadDim, typename T>
void launch_gathered_backward(const GatheredParams& params, cudaStream_t stream) {
  using Shape = GatheredTilesShape<kHeadDim>;
  launch_gathered_body<GatheredTilesQueries<GpuThread<T>, kHeadDim>, Shape::kThreads,
                       Shape::kQueriesBlocks>(params, Shape::kQueriesBytes, stream);
  launch_gathered_body<GatheredTilesKeys<GpuThread<T>, kHeadDim>, Shape::kThreads,
                       Shape::kKeysBlocks>(params, Shape::kKeysBytes, stream);
}

template <int kHeadDim>
void launch_gathered_forward_of(const GatheredParams& params, cudaStream_t stream) {
  if (params.dtype == KernelDtype::kHalf) {
    return launch_gathered_forward<kHeadDim, __half>(params, stream);
  }
  launch_gathered_forward<kHeadDim, __nv_bfloat16>(params, stream);
}
template <int kHeadDim>
void launch_gathered_backward_of(const GatheredParams& params, cudaStream_t stream) {
  if (params.dtype == KernelDtype::kHalf) {
    return launch_gathered_backward<kHeadDim, __half>(params, stream);
  }
  launch_gathered_backward<kHeadDim, __nv_bfloat16>(params, stream);
}

extern template void launch_gathered_forward_of<64>(const GatheredParams&, cudaStream_t);
extern template void launch_gathered_forward_of<128>(const GatheredParams&, cudaStream_t);
extern template void launch_gathered_forward_of<256>(const GatheredParams&, cudaStream_t);
extern template void launch_gathered_backward_of<64>(const GatheredParams&, cudaStream_t);
extern template void launch_gathered_backward_of<128>(const GatheredParams&, cudaStream_t);
extern template void launch_gathered_backward_of<256>(const GatheredParams&, cudaStream_t);

}  // namespace birkhoff
