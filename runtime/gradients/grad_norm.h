// The global norm of the gradients.
#pragma once

#include "runtime/gradients/grad_buckets.h"

namespace birkhoff {

// fp64, on the gradients' device: sums of squares of blocks of fixed size of all reduced gradients.
// Collective over the buckets' group if they are sliced, else local; asynchronous.
at::Tensor gradient_block_sums(const GradBuckets& buckets);

// The norm that they make: waits for the device.
double norm_of_block_sums(const GradBuckets& buckets, const at::Tensor& block_sums);

// Both. Euclidean norm of all reduced gradients in the buckets, accumulated in fp64 over blocks of
// fixed size that are added in order: the same bits for every number of threads, with and without
// slices, and, for equal gradients, of ranks and on every device. Not finite if any gradient is
// not.
double gradient_norm(const GradBuckets& buckets);

}  // namespace birkhoff
