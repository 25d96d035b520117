// GELU, y = x Phi(x), and its gradient, d_x = d_y (Phi(x) + x phi(x)), each in one pass over n
// elements; Phi and phi are the distribution function and the density of N(0, 1). Raw pointers, no
// LibTorch.
#pragma once

#include <cstddef>

#include "attention/kernels/common/number_types.h"

namespace birkhoff {

template <typename T>
struct GeluKernels {
  void (*forward)(const T* x, std::size_t n, T* y);
  void (*backward)(const T* x, const T* d_y, std::size_t n, T* d_x);
};

// For T = float and Bf16, in fp32. Only for CPUs with InstructionSet::kAvx512Bf16: elsewhere
// training keeps the bits of at::gelu.
template <typename T>
const GeluKernels<T>& gelu_kernels();

}  // namespace birkhoff
