// The launch of a kernel whose source takes its thread class as a template parameter, so that it
// can also run on the CPU (cluster/base/gpu/gpu_thread.cuh).
#pragma once

#include <cstddef>

#include "cluster/base/gpu/elements.cuh"
#include "cluster/base/gpu/gpu_thread.cuh"
#include "cluster/base/gpu/launch.h"

namespace birkhoff {

// Body::kThreadBlocks is the number of thread blocks that a multiprocessor should run at once,
// which bounds their registers. More than one only where the compiler then spills no registers. It
// is always given: without it the compiler would spill registers to fit more thread blocks.
template <typename Body, typename Params>
__global__ void __launch_bounds__(Body::kThreads, Body::kThreadBlocks)
    body_kernel(const __grid_constant__ Params p) {
  Body({}, p).run();
}

template <typename Body, typename Params>
void launch_body(const Params& params, cudaStream_t stream, int shared_bytes = Body::kSharedBytes) {
  launch({.blocks = Body::num_tasks(params),
          .threads = Body::kThreads,
          .stream = stream,
          .shared_bytes = static_cast<std::size_t>(shared_bytes)},
         &body_kernel<Body, Params>, params);
}

}  // namespace birkhoff
