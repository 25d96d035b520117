// The update rules in LibTorch operations: the reference for the CPU loop and the GPU kernel.
#pragma once

#include "runtime/optimizers/gpu_fused_update.h"

namespace birkhoff::test {

// As fused_update(), on any device and in any floating dtype.
void reference_update(FusedBucket& bucket, const AdamWRule& rule, const at::Tensor& scalars_K,
                      const at::Tensor& num_updates_1);
void reference_update(FusedBucket& bucket, const SgdRule& rule, const at::Tensor& scalars_K,
                      const at::Tensor& num_updates_1);

}  // namespace birkhoff::test
