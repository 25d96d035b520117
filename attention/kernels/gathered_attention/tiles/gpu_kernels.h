// The choice of kernels, for their launches and for their emulation on the CPU.
#pragma once

#include "attention/kernels/gathered_attention/tiles/gpu_backward.h"
#include "attention/kernels/gathered_attention/tiles/gpu_forward.h"

namespace birkhoff {

// Calls run.operator()<Kernel>() for each kernel of a pass with head dims up to kHeadDim.
template <typename Thread, int kHeadDim, typename Run>
void with_forward_tiles(const GatheredParams& p, const Run& run) {
  with_flag(p.has_terms(), [&]<bool kTerms>() {
    run.template operator()<GatheredTilesForward<Thread, kHeadDim, kTerms>>();
  });
}
template <typename Thread, int kHeadDim, typename Run>
void for_each_backward_tiles(const GatheredParams& p, const Run& run) {
  with_flag(p.has_terms(), [&]<bool kTerms>() {
    run.template operator()<GatheredTilesQueries<Thread, kHeadDim, kTerms>>();
    run.template operator()<GatheredTilesKeys<Thread, kHeadDim, kTerms>>();
  });
}

}  // namespace birkhoff
