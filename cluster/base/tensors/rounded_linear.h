// Products with weights that are stored in a wider dtype than they compute in.
//
// Legend: N rows, I inputs, O outputs.
#pragma once

#include <ATen/core/Tensor.h>

namespace birkhoff {

// y[.., O] = x[.., I] weight^T (+ bias), in the dtype of x, to which weight and bias are rounded.
// Both are of one dtype; the bias may be undefined. If they are rounded, their gradients are those
// of the functions below, and gradients of gradients are refused.
at::Tensor rounded_linear(const at::Tensor& x, const at::Tensor& weight_OI,
                          const at::Tensor& bias_O);

// The gradient of a weight, d_y^T x [O, I], and of a bias, [O], in `dtype`: fp32 or that of d_y and
// x. A GPU's sums are written in `dtype`. LibTorch has no such product for CPUs: there they are
// first rounded to the dtype of d_y.
at::Tensor weight_gradient(const at::Tensor& d_y_NO, const at::Tensor& x_NI, at::ScalarType dtype);
at::Tensor bias_gradient(const at::Tensor& d_y_NO, at::ScalarType dtype);

}  // namespace birkhoff
