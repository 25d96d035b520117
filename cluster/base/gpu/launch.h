// The only way to launch a kernel: on an explicit stream, with its status checked. For .cu files.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <source_location>
#include <utility>

#include "cluster/base/gpu/check.h"

namespace birkhoff {

// The bytes of shared memory that a block may have on the thread's device.
inline std::size_t most_shared_bytes() {
  int device = 0, bytes = 0;
  cuda_check(cudaGetDevice(&device), "cudaGetDevice");
  cuda_check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
             "cudaDeviceGetAttribute");
  return static_cast<std::size_t>(bytes);
}

struct LaunchShape {
  std::int64_t blocks;  // 0: nothing is launched
  int threads;          // of a block
  cudaStream_t stream;
  std::size_t shared_bytes = 0;  // of a block, dynamic
  std::source_location where = std::source_location::current();
};

// kernel<<<blocks, threads, shared_bytes, stream>>>(arguments...), with its status checked.
template <typename... Parameters, typename... Arguments>
void launch(const LaunchShape& shape, void (*kernel)(Parameters...), Arguments&&... arguments) {
  constexpr std::size_t kMostByDefault = 48 * 1024;
  if (shape.blocks == 0) return;
  const bool asks = shape.shared_bytes > kMostByDefault;
  check_launch_fits(shape.blocks, shape.shared_bytes, asks ? most_shared_bytes() : kMostByDefault,
                    shape.where);
  if (asks) {
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(shape.shared_bytes)),
               "cudaFuncSetAttribute", shape.where);
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(shape.blocks));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = shape.stream;
  cuda_check(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...),
             "kernel launch", shape.where);
  cuda_check_launch(shape.stream, shape.where);
}

}  // namespace birkhoff
