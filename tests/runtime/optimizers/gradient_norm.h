// The norm of the gradients in buckets, in one call.
#pragma once

#include "runtime/gradients/grad_norm.h"

namespace birkhoff::test {

inline double gradient_norm(const GradBuckets& buckets) {
  return norm_of_chunk_sums(buckets, gradient_chunk_sums(buckets));
}

}  // namespace birkhoff::test
