// The global norm of the gradients.
#pragma once

#include "runtime/grad_buckets.h"

namespace birkhoff {

// Euclidean norm of all reduced gradients in the buckets, accumulated in fp64 over blocks of fixed
// size that are added in order: the same bits for every number of threads, with and without slices,
// and, for equal gradients, of ranks and on every device. Not finite if any gradient is not.
// Collective over the buckets' group if they are sliced, else local; waits for the device.
double gradient_norm(const GradBuckets& buckets);

}  // namespace birkhoff
