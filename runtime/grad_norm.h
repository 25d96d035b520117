// The global norm of the gradients.
#pragma once

#include "runtime/grad_buckets.h"

namespace birkhoff {

// Euclidean norm of all gradients in the buckets, accumulated in fp64 over blocks of fixed size
// that are added in order: the same bits for every number of threads, and, for equal gradients, of
// ranks. Not finite if any gradient is not. Local.
double gradient_norm(const GradBuckets& buckets);

}  // namespace birkhoff
