// Arguments of the kernels for a feed-forward layer's bias and activation. See
// models/transformer/activation/gpu_activation.cu.
#pragma once

#include <cstdint>

#include "cluster/base/gpu/kernel_types.h"

struct CUstream_st;

namespace birkhoff {

enum class ActivationKind { kRelu, kGelu, kGeglu };

// All arrays are contiguous and aligned to 16 bytes. `columns` of x are twice the width of y for
// kGeglu, else that width.
struct ActivationParams {
  static constexpr int kMultiple = 8;  // of the width of y
  static constexpr std::int64_t kPartRows = 256;

  ActivationKind kind;
  KernelDtype dtype;  // of x, y, d_y and d_x: fp32, bf16 or fp16
  std::int64_t rows;  // at least 1
  int width;          // of y
  const void* x;      // [rows, columns]
  const float* bias;  // [columns]; null: none
  void* y;            // forward: [rows, width]

  // Backward.
  const void* d_y;  // [rows, width]
  void* d_x;        // [rows, columns]
  float* partials;  // [parts(), columns]: the bias's gradient from kPartRows rows; null without one

  // The widths of y in a row of x.
  static int num_halves(ActivationKind kind) { return kind == ActivationKind::kGeglu ? 2 : 1; }
  int columns() const { return num_halves(kind) * width; }
  std::int64_t parts() const { return (rows + kPartRows - 1) / kPartRows; }
};

// Asynchronous on `stream`.
void launch_activation(const ActivationParams& params, CUstream_st* stream);
void launch_activation_backward(const ActivationParams& params, CUstream_st* stream);

}  // namespace birkhoff
