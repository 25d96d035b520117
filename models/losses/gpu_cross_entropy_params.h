// Arguments of the fused cross-entropy kernels. See models/losses/gpu_cross_entropy.cu.
#pragma once

#include <cstdint>

#include "cluster/base/gpu/kernel_types.h"

struct CUstream_st;

namespace birkhoff {

struct FusedCrossEntropyParams {
  void* logits;                 // [rows, vocabulary]: logits in, gradients out
  KernelDtype dtype;            // fp32, bf16 or fp16
  const std::int64_t* targets;  // [rows]
  const std::uint8_t* mask;     // [rows]
  float* nats;                  // [rows]
  float* losses;                // [rows]; written only with label smoothing
  float label_smoothing;
  std::int64_t rows, vocabulary;  // vocabulary: below 2^30
  bool vectors;                   // every row starts at a multiple of 16 bytes
};

// x *= *factor. If the factor is 1, x is neither read nor written.
struct ScaleParams {
  void* x;              // [count], contiguous
  KernelDtype dtype;    // fp32, bf16 or fp16
  const float* factor;  // device memory
  std::int64_t count;
  bool vectors;  // x starts at a multiple of 16 bytes and consists of whole 16-byte vectors
};

// Asynchronous on `stream`.
void launch_scale(const ScaleParams& params, CUstream_st* stream);
void launch_fused_cross_entropy(const FusedCrossEntropyParams& params, CUstream_st* stream);

}  // namespace birkhoff
