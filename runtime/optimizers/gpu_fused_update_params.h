// Arguments of the update kernel. See runtime/optimizers/gpu_fused_update.cu.
#pragma once

#include <cstdint>

#include "cluster/base/gpu/kernel_types.h"
#include "runtime/optimizers/update_rules.h"

struct CUstream_st;

namespace birkhoff {

inline constexpr std::int64_t kDecayGroup = 64;  // elements that share a flag of `decayed`

template <typename Rule>
struct FusedUpdateParams {
  Rule rule;
  std::int64_t elements;  // n, a multiple of kDecayGroup
  // All in device memory, [n], aligned to 16 bytes.
  float* values;
  float* states[Rule::kNumStates];
  const void* gradients;  // of gradient_dtype: fp32 or bf16
  KernelDtype gradient_dtype;
  const std::uint8_t* decayed;  // [n / kDecayGroup]: 0: no weight decay for this group
  // Device scalars, fp64.
  const double* learning_rate;
  const double* gradient_scale;
  const double* apply;        // 0: nothing is written
  const double* num_updates;  // including this one
};

// Asynchronous on `stream`.
void launch_fused_update(const FusedUpdateParams<AdamWRule>& params, CUstream_st* stream);
void launch_fused_update(const FusedUpdateParams<SgdRule>& params, CUstream_st* stream);

}  // namespace birkhoff
