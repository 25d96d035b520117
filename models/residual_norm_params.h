// Arguments of the kernels of residual addition and layer norm. See models/residual_norm.cu.
#pragma once

#include <cstdint>

#include "cluster/base/cuda/dtype.h"

struct CUstream_st;

namespace birkhoff {

// Tensors of `dtype` (fp32, bf16 or fp16), contiguous, aligned to 16 bytes.
struct ResidualNormParams {
  KernelDtype dtype;
  std::int64_t rows, channels;  // channels a multiple of 4, at most kMostChannels
  const void* x;                // [rows, channels]
  const void* y;                // [rows, channels]
  const void* weight;           // [channels]
  const void* bias;             // [channels], or null: none
  float epsilon;
  void* sum;     // [rows, channels]: x + y
  void* normed;  // [rows, channels]
  float* mean;   // [rows]
  float* rstd;   // [rows]: 1 / standard deviation

  static constexpr std::int64_t kMostChannels = 8192;
};

struct ResidualNormBackwardParams {
  KernelDtype dtype;
  std::int64_t rows, channels;
  const void* d_sum;     // [rows, channels]: what reaches x + y by the residual path
  const void* d_normed;  // [rows, channels]
  const void* sum;       // [rows, channels], as are the next two of the forward pass
  const float* mean;     // [rows]
  const float* rstd;     // [rows]
  const void* weight;    // [channels]
  void* d_x;             // [rows, channels]: the gradient of x, and of y
  float* partials;       // [parts(rows), 2, channels], scratch
  void* d_weight;        // [channels]
  void* d_bias;          // [channels], or null: none

  // Parts of the rows whose sums over rows are made apart. Depends on the rows alone, so that the
  // bits do not depend on the device.
  static constexpr std::int64_t parts(std::int64_t rows) { return rows < 256 ? rows : 256; }
};

// Asynchronous on `stream`.
void launch_residual_norm(const ResidualNormParams& params, CUstream_st* stream);
void launch_residual_norm_backward(const ResidualNormBackwardParams& params, CUstream_st* stream);

}  // namespace birkhoff
