// The global norm of the gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "runtime/gradients/grad_buckets.h"

namespace birkhoff {

// fp64 [sum of ceil(n / kSumChunk)] on the tensors' device: for each tensor in turn, the sum of
// x_n[i]^2 over each chunk of kSumChunk elements, in the order of runtime/gradients/fixed_order.h:
// the same bits on every device and for any number of threads. tensors: at least one, of one device
// and dtype (fp32, bf16 or, on a CPU only, fp64), contiguous, [n]. Local; on a CUDA device
// asynchronous on the current stream.
at::Tensor chunk_sums_of_squares(const std::vector<at::Tensor>& tensors);

// fp64, on the gradients' device: sums of squares over fixed-size chunks of all reduced gradients.
// Collective over their slice_group() if they are sliced, else local; asynchronous.
at::Tensor gradient_chunk_sums(const GradBuckets& buckets);

// What reductions of the norm are for.
inline constexpr char kGradientNorm[] = "gradient norm";

// The Euclidean norm of all reduced gradients in the buckets: these sums, added in order. The same
// bits for any number of threads, with and without slices, and, for equal gradients, for any number
// of data-parallel ranks and on every device. Not finite if any gradient is not. Waits for the
// device. Collective over the tensor axis.
double norm_of_chunk_sums(const GradBuckets& buckets, const at::Tensor& chunk_sums);

}  // namespace birkhoff
