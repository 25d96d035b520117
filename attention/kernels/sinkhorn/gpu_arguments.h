// Runs the GPU kernels of the balances (gpu_params.h) on tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "attention/kernels/sinkhorn/sinkhorn.h"

namespace birkhoff {

// Whether this program has GPU kernels that can solve the problem: fp32 on a GPU, at most 256 rows
// and columns, and a backward pass whose memory stays within a bound.
bool fits_gpu_kernels(const at::Tensor& scores, std::int64_t iterations, bool prefix,
                      std::int64_t first_row);

// balance(), or prefix_balance() with `prefix`, of scores for which fits_gpu_kernels() returns
// true. Differentiable. Asynchronous on the current stream.
at::Tensor balance_on_gpu(const at::Tensor& scores, std::int64_t iterations, bool prefix,
                          std::int64_t first_row);

// balance_and_round() of such scores, for bf16 or fp16.
BalancedWeights balance_and_round_on_gpu(const at::Tensor& scores, std::int64_t iterations,
                                         at::ScalarType dtype);

}  // namespace birkhoff
