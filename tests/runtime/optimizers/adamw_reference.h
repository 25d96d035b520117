// AdamW's update in LibTorch operations: the reference for the CPU loop and the GPU kernel.
#pragma once

#include "runtime/optimizers/gpu_adamw.h"

namespace birkhoff::test {

// As fused_adamw(), on any device and in any floating dtype.
void reference_adamw(FusedAdamWBucket& bucket, const AdamWConstants& constants,
                     const at::Tensor& scalars_K, const at::Tensor& num_updates_1);

}  // namespace birkhoff::test
