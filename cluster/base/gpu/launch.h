// The only way to launch a kernel: on an explicit stream, with its status checked. For .cu files.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <source_location>
#include <utility>

#include "cluster/base/gpu/check.h"

namespace birkhoff {

struct LaunchShape {
  dim3 grid, block;
  cudaStream_t stream;
  std::size_t shared_bytes = 0;  // dynamic
  std::source_location where = std::source_location::current();
};

// kernel<<<grid, block, shared_bytes, stream>>>(arguments...), with its status checked.
template <typename... Parameters, typename... Arguments>
void launch(const LaunchShape& shape, void (*kernel)(Parameters...), Arguments&&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = shape.stream;
  cuda_check(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...),
             "kernel launch", shape.where);
  cuda_check_launch(shape.stream, shape.where);
}

}  // namespace birkhoff
