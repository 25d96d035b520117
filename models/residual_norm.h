// Residual addition and the layer norm after it (Ba et al. 2016) as one operation, and its
// gradient: what stands between two sublayers of a pre-norm block.
//
// Legend: N rows (tokens), C channels.
#pragma once

#include <ATen/core/Tensor.h>

namespace birkhoff {

struct ResidualNorm {
  at::Tensor sum_NC;          // x + y: the residual stream
  at::Tensor normed_NC;       // layer norm of it
  at::Tensor mean_N, rstd_N;  // fp32 (fp64 for fp64): what the gradient needs
};

struct ResidualNormGradients {
  at::Tensor d_x_NC;  // of x, and of y
  at::Tensor d_weight_C, d_bias_C;
};

// x, y: [N, C], weight: [C], bias: [C] or undefined, all contiguous, of one dtype and device. The
// sum is rounded to that dtype, then normed in fp32 (fp64 for fp64). Local; on a CUDA device
// asynchronous on the current stream. Deterministic.
ResidualNorm residual_norm(const at::Tensor& x_NC, const at::Tensor& y_NC,
                           const at::Tensor& weight_C, const at::Tensor& bias_C, double epsilon);

// d_sum: the gradient that reaches the sum by the residual path alone. N at least 1; d_bias is
// undefined unless has_bias.
ResidualNormGradients residual_norm_backward(const at::Tensor& d_sum_NC,
                                             const at::Tensor& d_normed_NC,
                                             const ResidualNorm& forward,
                                             const at::Tensor& weight_C, bool has_bias);

// The same in LibTorch operations, on any device and in any floating dtype: the specification.
ResidualNorm reference_residual_norm(const at::Tensor& x_NC, const at::Tensor& y_NC,
                                     const at::Tensor& weight_C, const at::Tensor& bias_C,
                                     double epsilon);
ResidualNormGradients reference_residual_norm_backward(const at::Tensor& d_sum_NC,
                                                       const at::Tensor& d_normed_NC,
                                                       const ResidualNorm& forward,
                                                       const at::Tensor& weight_C, bool has_bias);

}  // namespace birkhoff
