// Balances of tensors by the GPU kernels (gpu_params.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "attention/kernels/sinkhorn/gpu_params.h"
#include "attention/kernels/sinkhorn/sinkhorn.h"

namespace birkhoff {

// Why the kernels cannot solve the problem, wherever its tensor is; empty if they can. They take
// fp32, at most 256 rows and columns, at most 20 iterations if cumulative, and a backward pass
// whose memory stays within a bound.
std::string why_not_gpu_kernels(const at::Tensor& scores, std::int64_t iterations, BalanceKind kind,
                                std::int64_t first_row);

// The balance of scores on a GPU that the kernels can solve.
// Differentiable. Asynchronous on the current stream.
at::Tensor balance_on_gpu(const at::Tensor& scores, std::int64_t iterations, BalanceKind kind,
                          std::int64_t first_row);

// balance_and_round() of such scores, for bf16 or fp16.
BalancedWeights balance_and_round_on_gpu(const at::Tensor& scores, std::int64_t iterations,
                                         at::ScalarType dtype);

}  // namespace birkhoff
