// The global norm of the gradients.
#pragma once

#include "runtime/gradients/grad_buckets.h"

namespace birkhoff {

// fp64, on the gradients' device: sums of squares over fixed-size chunks of all reduced gradients.
// Collective over the buckets' group if they are sliced, else local; asynchronous.
at::Tensor gradient_chunk_sums(const GradBuckets& buckets);

// The Euclidean norm of all reduced gradients in the buckets: these sums, added in order. The same
// bits for any number of threads, with and without slices, and, for equal gradients, for any number
// of ranks and on every device. Not finite if any gradient is not. Waits for the device.
double norm_of_chunk_sums(const GradBuckets& buckets, const at::Tensor& chunk_sums);

}  // namespace birkhoff
