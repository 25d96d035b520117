// Sums of squares over the chunks of a flat tensor, on its device: the terms of the global gradient
// norm (runtime/gradients/grad_norm.h).
#pragma once

#include <ATen/core/Tensor.h>

namespace birkhoff {

// fp64 [ceil(n / kSumChunk)] on x's device: the sum of x_n[i]^2 over each chunk of kSumChunk
// elements, in the order of runtime/gradients/fixed_order.h: the same bits on every device and for
// any number of threads. x_n: contiguous, fp32, bf16 or (CPU only) fp64. Local; on a CUDA device
// asynchronous on the current stream.
at::Tensor chunk_sums_of_squares(const at::Tensor& x_n);

}  // namespace birkhoff
