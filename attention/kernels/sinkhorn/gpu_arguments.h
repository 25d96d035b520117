// From tensors to the kernels of the balances on a GPU (gpu_params.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace birkhoff {

// Whether this program has kernels that can do this: fp32 on a GPU, up to 256 rows and columns, and
// a backward pass that finds memory.
bool fits_gpu_kernels(const at::Tensor& scores, std::int64_t iterations, bool prefix,
                      std::int64_t first_row);

// balance(), or with `prefix` prefix_balance(), of what fits. Differentiable. Asynchronous on the
// current stream.
at::Tensor balance_on_gpu(const at::Tensor& scores, std::int64_t iterations, bool prefix,
                          std::int64_t first_row);

}  // namespace birkhoff
