// Residual addition and the layer norm after it (Ba et al. 2016) as one operation, and its
// gradient: what stands between two sublayers of a pre-norm block.
//
// Legend: N rows (tokens), C channels. The residual stream is fp32 (or fp64); what a branch adds to
// it, and what the next branch takes, may be bf16 or fp16 (train.precision).
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

namespace birkhoff {

struct ResidualNorm {
  at::Tensor sum_NC;          // x + y: the residual stream, of x's dtype
  at::Tensor normed_NC;       // layer norm of it, of y's dtype
  at::Tensor mean_N, rstd_N;  // of x's dtype: what the gradient needs
};

struct ResidualNormGradients {
  at::Tensor d_x_NC;  // of x's dtype
  at::Tensor d_y_NC;  // the same, of y's dtype
  at::Tensor d_weight_C, d_bias_C;
};

// x: [N, C] fp32 (fp64 on the CPU), y: [N, C] of that dtype, bf16 or fp16; weight: [C], bias: [C]
// or undefined, of x's dtype; all contiguous, of one device. Arithmetic in x's dtype. Local; on a
// CUDA device asynchronous on the current stream. Deterministic.
ResidualNorm residual_norm(const at::Tensor& x_NC, const at::Tensor& y_NC,
                           const at::Tensor& weight_C, const at::Tensor& bias_C, double epsilon);

// d_sum: the gradient that reaches the sum by the residual path alone, of x's dtype; d_normed: of
// y's. N at least 1; d_bias is undefined unless has_bias.
ResidualNormGradients residual_norm_backward(const at::Tensor& d_sum_NC,
                                             const at::Tensor& d_normed_NC,
                                             const ResidualNorm& forward,
                                             const at::Tensor& weight_C, bool has_bias);

// The same in LibTorch operations, on any device: the specification.
ResidualNorm reference_residual_norm(const at::Tensor& x_NC, const at::Tensor& y_NC,
                                     const at::Tensor& weight_C, const at::Tensor& bias_C,
                                     double epsilon);
ResidualNormGradients reference_residual_norm_backward(const at::Tensor& d_sum_NC,
                                                       const at::Tensor& d_normed_NC,
                                                       const ResidualNorm& forward,
                                                       const at::Tensor& weight_C, bool has_bias);

// Differentiable: x + y and its layer norm, for x and y [.., C] as residual_norm() takes them but
// of any layout; bias may be undefined.
std::pair<at::Tensor, at::Tensor> add_and_norm(const at::Tensor& x, const at::Tensor& y,
                                               const at::Tensor& weight_C, const at::Tensor& bias_C,
                                               double epsilon);

}  // namespace birkhoff
