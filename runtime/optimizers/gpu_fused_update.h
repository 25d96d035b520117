// One update of a flat bucket on a GPU: the same as FusedOptimizer::step
// (runtime/optimizers/fused_optimizer.h) for a bucket in host memory, but with every scalar read
// from device memory.
//
// Legend: n elements of the bucket.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "runtime/optimizers/step_scalars.h"
#include "runtime/optimizers/update_rules.h"

namespace birkhoff {

// Tensors on one device, contiguous, 1-D, with data aligned to 16 bytes.
struct FusedBucket {
  at::Tensor values_n;               // fp32: the parameters, or their master copies
  at::Tensor gradients_n;            // of the values' dtype, or bf16
  std::vector<at::Tensor> states_n;  // the rule's, each as values_n
  at::Tensor decayed_G;  // u8 [n / 64]: 0 where weight decay does not apply to the 64 elements
};

// Updates values and states in place by AdamWRule or SgdRule. scalars_K: the fp64 values of
// StepScalars, by its indices; with kApply 0 nothing is written. num_updates_1: fp64 [1], the
// number of this update, from 1. n is a multiple of 64. Local; asynchronous on the current stream.
template <typename Rule>
void fused_update(FusedBucket& bucket, const Rule& rule, const at::Tensor& scalars_K,
                  const at::Tensor& num_updates_1);

}  // namespace birkhoff
