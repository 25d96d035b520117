// Sums of squares over the chunks of flat tensors, on their device: the terms of the global
// gradient norm (runtime/gradients/grad_norm.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace birkhoff {

// fp64 [sum of ceil(n / kSumChunk)] on the tensors' device: for each tensor in turn, the sum of
// x_n[i]^2 over each chunk of kSumChunk elements, in the order of runtime/gradients/fixed_order.h:
// the same bits on every device and for any number of threads. tensors: at least one, of one device
// and dtype (fp32, bf16 or, on a CPU only, fp64), contiguous, [n]. Local; on a CUDA device
// asynchronous on the current stream.
at::Tensor chunk_sums_of_squares(const std::vector<at::Tensor>& tensors);

}  // namespace birkhoff
