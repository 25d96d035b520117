// Residual addition and the layer norm that follows it (Ba et al. 2016) as one operation, and its
// gradient. It connects two sublayers of a pre-norm Transformer.
//
// Legend: N rows (tokens), C channels. The residual stream is fp32 (or fp64). The output of a
// branch and the input of the next branch may be bf16 or fp16 (train.precision).
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

namespace birkhoff {

struct ResidualNorm {
  at::Tensor sum_NC;          // x + y: the residual stream, in x's dtype; x itself without y
  at::Tensor normed_NC;       // layer norm of sum_NC, in the branch's dtype
  at::Tensor mean_N, rstd_N;  // in x's dtype; the gradient needs them
};

struct ResidualNormGradients {
  at::Tensor d_x_NC;  // in x's dtype
  at::Tensor d_y_NC;  // the same values in the branch's dtype; undefined without y
  at::Tensor d_weight_C, d_bias_C;
};

// x: [N, C], fp32 (fp64 on the CPU). y: [N, C], in the branch's dtype: that of x, bf16 or fp16; or
// undefined. weight: [C], and bias: [C] or undefined, in x's dtype. All are contiguous and on one
// device. Arithmetic in x's dtype. Local; on a CUDA device asynchronous on the current stream.
// Deterministic.
ResidualNorm residual_norm(const at::Tensor& x_NC, const at::Tensor& y_NC,
                           const at::Tensor& weight_C, const at::Tensor& bias_C, double epsilon,
                           at::ScalarType branch);

// What the gradient depends on besides the tensors.
struct ResidualNormTerms {
  bool branch, bias;  // whether y and the bias were defined
};
// d_sum: the gradient of the sum through the residual path only, in x's dtype. d_normed: in the
// branch's dtype. N must be at least 1. Gradients of terms that were undefined are undefined.
ResidualNormGradients residual_norm_backward(const at::Tensor& d_sum_NC,
                                             const at::Tensor& d_normed_NC,
                                             const ResidualNorm& forward,
                                             const at::Tensor& weight_C, ResidualNormTerms terms);

// The specification: the same functions in LibTorch operations, on any device.
ResidualNorm reference_residual_norm(const at::Tensor& x_NC, const at::Tensor& y_NC,
                                     const at::Tensor& weight_C, const at::Tensor& bias_C,
                                     double epsilon, at::ScalarType branch);
ResidualNormGradients reference_residual_norm_backward(const at::Tensor& d_sum_NC,
                                                       const at::Tensor& d_normed_NC,
                                                       const ResidualNorm& forward,
                                                       const at::Tensor& weight_C,
                                                       ResidualNormTerms terms);

// Returns x + y and its layer norm, both differentiable. x and y: [.., C], as for residual_norm()
// but in any memory layout. y and bias may be undefined.
std::pair<at::Tensor, at::Tensor> add_and_norm(const at::Tensor& x, const at::Tensor& y,
                                               const at::Tensor& weight_C, const at::Tensor& bias_C,
                                               double epsilon, at::ScalarType branch);

}  // namespace birkhoff
