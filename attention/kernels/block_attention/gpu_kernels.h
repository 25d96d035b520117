// The choice of kernels, for their launches and for their emulation on the CPU.
#pragma once

#include "attention/kernels/block_attention/gpu_backward.h"
#include "attention/kernels/block_attention/gpu_forward.h"

namespace birkhoff {

// Calls run.operator()<Kernel>() for the kernel of a forward pass with head dims up to kHeadDim.
template <typename Thread, int kHeadDim, typename Run>
void with_forward_kernel(const BlockAttentionParams& p, const Run& run) {
  with_flag(p.has_values(), [&]<bool kValues>() {
    run.template operator()<BlockAttentionForward<Thread, kHeadDim, kValues>>();
  });
}

// The same for each kernel of a backward pass.
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
  with_flag(p.has_values(), [&]<bool kValues>() {
    run.template
    operator()<BlockAttentionBackwardQueries<Thread, kHeadDim, 1, false, kStages, kValues>>();
    run.template operator()<BlockAttentionBackwardKeys<Thread, kHeadDim, kValues>>();
  });
}

}  // namespace birkhoff
