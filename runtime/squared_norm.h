// The squared norm of a flat bucket, on the bucket's device.
#pragma once

#include <ATen/core/Tensor.h>

namespace birkhoff {

// total_1 += sum of x_n[i]^2, along the fixed tree of runtime/fixed_order.h: the same bits on every
// device, and for any number of threads. x_n: contiguous, fp32, bf16 or (CPU only) fp64; total_1:
// fp64 [1] on its device. Local; on a CUDA device asynchronous on the current stream.
void add_squared_norm(const at::Tensor& x_n, at::Tensor total_1);

}  // namespace birkhoff
