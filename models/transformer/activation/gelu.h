// GELU (Hendrycks and Gimpel 2016), x Phi(x), elementwise.
#pragma once

#include <ATen/core/Tensor.h>

namespace birkhoff {

// Like at::gelu, and differentiable once. For contiguous fp32 and bf16 on CPUs with AVX-512 BF16 it
// has loops of its own (cpu_gelu.h), as exact as LibTorch's.
at::Tensor gelu(const at::Tensor& x);

}  // namespace birkhoff
