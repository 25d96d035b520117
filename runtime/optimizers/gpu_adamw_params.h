// Arguments of the AdamW kernel. See runtime/optimizers/gpu_adamw.cu.
#pragma once

#include <cstdint>

#include "cluster/base/gpu/kernel_types.h"

struct CUstream_st;

namespace birkhoff {

struct FusedAdamWParams {
  std::int64_t elements;  // n, a multiple of kGroup
  // All in device memory, [n], aligned to 16 bytes.
  float* values;
  float* m;
  float* v;
  const void* gradients;  // of gradient_dtype: fp32 or bf16
  KernelDtype gradient_dtype;
  const std::uint8_t* decayed;  // [n / kGroup]: 0: no weight decay for this group
  // Device scalars, fp64.
  const double* learning_rate;
  const double* gradient_scale;
  const double* apply;        // 0: nothing is written
  const double* num_updates;  // including this one
  double beta1, beta2, epsilon, weight_decay;

  static constexpr std::int64_t kGroup = 64;  // elements that share a flag of `decayed`
};

// Asynchronous on `stream`.
void launch_fused_adamw(const FusedAdamWParams& params, CUstream_st* stream);

}  // namespace birkhoff
