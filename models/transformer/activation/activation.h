// The activation between the two layers of a feed-forward network.
#pragma once

#include <ATen/core/Tensor.h>

#include "models/transformer/activation/gpu_activation_params.h"

namespace birkhoff {

// GELU (Hendrycks and Gimpel 2016), x Phi(x), elementwise; like at::gelu, and differentiable once.
// For contiguous fp32 and bf16 on CPUs with AVX-512 BF16 it has loops of its own (cpu_gelu.h), as
// exact as LibTorch's.
at::Tensor gelu(const at::Tensor& x);

// relu, gelu, or gelu of the first half of the columns times the second half (Shazeer
// 2020, "GLU Variants Improve Transformer"), of x + bias: x [.., F or 2F], bias [F or 2F] in fp32
// or x's dtype, or undefined. Returns [.., F]. Differentiable once.
//
// On a GPU one kernel each way, which also adds up the gradient of the bias, in fp32; for F that is
// no multiple of 8, and for other dtypes than fp32, bf16 and fp16, LibTorch's operations.
at::Tensor activate(ActivationKind kind, const at::Tensor& x, const at::Tensor& bias);

}  // namespace birkhoff
