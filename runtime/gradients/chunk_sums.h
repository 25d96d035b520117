// Sums of squares over the blocks of a flat tensor, on its device: what the norm of all gradients
// is added up from (runtime/gradients/grad_norm.h).
#pragma once

#include <ATen/core/Tensor.h>

namespace birkhoff {

// fp64 [ceil(n / kSumBlock)] on x's device: the sum of x_n[i]^2 over each block of kSumBlock
// elements (runtime/gradients/fixed_order.h), in its order: the same bits on every device and for
// any number of threads. x_n: contiguous, fp32, bf16 or (CPU only) fp64. Local; on a CUDA device
// asynchronous on the current stream.
at::Tensor block_sums_of_squares(const at::Tensor& x_n);

}  // namespace birkhoff
