// The choice of kernels, for their launches and for their emulation on the CPU.
#pragma once

#include "attention/kernels/block_attention/gpu_backward.h"

namespace birkhoff {

// Calls run.operator()<Kernel>() for each kernel of a backward pass with head dims up to kHeadDim.
template <typename Thread, int kHeadDim, typename Run>
void for_each_backward_kernel(const BlockAttentionParams& p, const Run& run) {
  constexpr int kStages = GpuTileShape<kHeadDim>::kBackwardStages;
  if (p.owns_keys(kTileRows)) {
    if constexpr (kHeadDim <= 128) {
      // There is one tile of keys. Without memory for a second one, more thread blocks fit.
      if (p.num_sources == 1) {
        return run
            .template operator()<BlockAttentionBackwardQueries<Thread, kHeadDim, 1, true, 1>>();
      }
    }
    return run
        .template operator()<BlockAttentionBackwardQueries<Thread, kHeadDim, 1, true, kStages>>();
  }
  if constexpr (kHeadDim <= 128) {
    if (p.owns_keys(2 * kTileRows)) {
      return run
          .template operator()<BlockAttentionBackwardQueries<Thread, kHeadDim, 2, true, kStages>>();
    }
  }
  run.template operator()<BlockAttentionBackwardQueries<Thread, kHeadDim, 1, false, kStages>>();
  run.template operator()<BlockAttentionBackwardKeys<Thread, kHeadDim>>();
}

}  // namespace birkhoff
