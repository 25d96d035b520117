// Arguments of the kernels for residual addition and layer norm. See
// models/transformer/gpu_residual_norm.cu.
#pragma once

#include <cstdint>

#include "cluster/base/gpu/kernel_types.h"

struct CUstream_st;

namespace birkhoff {

// All arrays are contiguous, aligned to 16 bytes and fp32, except those marked "branch", which have
// `branch_dtype` (fp32, bf16 or fp16).
struct ResidualNormParams {
  KernelDtype branch_dtype;
  std::int64_t rows, channels;  // channels: a multiple of 4, at most kMaxChannels
  const float* x;               // [rows, channels]
  const void* y;                // [rows, channels], branch, or null for none
  const float* weight;          // [channels]
  const float* bias;            // [channels], or null for none
  float epsilon;
  float* sum;    // [rows, channels]: x + y. Not written without y
  void* normed;  // [rows, channels], branch
  float* mean;   // [rows]
  float* rstd;   // [rows]: 1 / standard deviation

  static constexpr std::int64_t kMaxChannels = 8192;
};

struct ResidualNormBackwardParams {
  KernelDtype branch_dtype;
  std::int64_t rows, channels;
  const float* d_sum;    // [rows, channels]: gradient of x + y through the residual path
  const void* d_normed;  // [rows, channels], branch
  const float* sum;      // [rows, channels], x without y; this and the next two: as forward
  const float* mean;     // [rows]
  const float* rstd;     // [rows]
  const float* weight;   // [channels]
  float* d_x;            // [rows, channels]
  void* d_y;             // [rows, channels], branch: d_x rounded, or null if not wanted
  float* partials;       // [parts(rows), 2, channels], scratch
  float* d_weight;       // [channels]
  float* d_bias;         // [channels], or null for none

  // Threads of a block, which processes a row at a time.
  static constexpr int threads(std::int64_t channels) {
    return channels <= 128 ? 32 : channels <= 512 ? 128 : 256;
  }
  // The number of parts of the rows that are summed separately, a block each: enough to keep the
  // memory of a large GPU busy. It depends only on the shape, so that the bits do not depend on the
  // device.
  static constexpr std::int64_t parts(std::int64_t rows, std::int64_t channels) {
    const std::int64_t most = (1 << 17) / threads(channels);
    return rows < most ? rows : most;
  }
};

// Asynchronous on `stream`.
void launch_residual_norm(const ResidualNormParams& params, CUstream_st* stream);
void launch_residual_norm_backward(const ResidualNormBackwardParams& params, CUstream_st* stream);

}  // namespace birkhoff
