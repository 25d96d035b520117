// One AdamW update of a flat bucket on a GPU: the same as AdamW::step (runtime/optimizers/adamw.h)
// for a bucket in host memory, but with every scalar read from device memory.
//
// Legend: n elements of the bucket.
#pragma once

#include <ATen/core/Tensor.h>

#include "runtime/optimizers/step_scalars.h"

namespace birkhoff {

// Tensors on one device, contiguous, 1-D, with data aligned to 16 bytes.
struct FusedAdamWBucket {
  at::Tensor values_n;     // fp32: the parameters, or their master copies
  at::Tensor gradients_n;  // of the values' dtype, or bf16
  at::Tensor m_n, v_n;     // as values_n
  at::Tensor decayed_G;    // u8 [n / 64]: 0 where weight decay does not apply to the 64 elements
};

struct AdamWConstants {
  double beta1, beta2, epsilon, weight_decay;
};

// Updates values, m and v in place. scalars_K: the fp64 values of StepScalars, by its indices; with
// kApply 0 nothing is written. num_updates_1: fp64 [1], the number of this update, from 1. n is a
// multiple of 64. Local; asynchronous on the current stream.
void fused_adamw(FusedAdamWBucket& bucket, const AdamWConstants& constants,
                 const at::Tensor& scalars_K, const at::Tensor& num_updates_1);

}  // namespace birkhoff
