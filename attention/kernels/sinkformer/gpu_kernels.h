// The order of the kernels of both passes, for their launches and for their emulation on the CPU.
#pragma once

#include "attention/kernels/sinkformer/gpu_backward.h"
#include "attention/kernels/sinkformer/gpu_forward.h"

namespace birkhoff {

// Calls run.operator()<Kernel>(params) for each kernel of a pass, with head dims up to kHeadDim.
template <typename Thread, int kHeadDim, typename Run>
void for_each_sinkformer_kernel(SinkformerParams p, const Run& run) {
  for (p.step = 1; p.step < p.half_steps; ++p.step) {
    run.template operator()<SinkformerStep<Thread, kHeadDim>>(p);
  }
  run.template operator()<SinkformerAttend<Thread, kHeadDim>>(p);
}

template <typename Thread, int kHeadDim, typename Run>
void for_each_sinkformer_backward_kernel(SinkformerParams p, const Run& run) {
  for (p.step = p.half_steps; p.step >= p.half_steps - 1; --p.step) {
    run.template operator()<SinkformerStart<Thread, kHeadDim>>(p);
  }
  if (p.unrolled) {
    for (p.step = p.half_steps - 2; p.step >= 1; --p.step) {
      run.template operator()<SinkformerUnroll<Thread, kHeadDim>>(p);
    }
  }
  for (p.step = 1; p.step <= 2; ++p.step) {
    run.template operator()<SinkformerGradient<Thread, kHeadDim>>(p);
  }
}

}  // namespace birkhoff
