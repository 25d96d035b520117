#include "runtime/grad_norm.h"

#include <ATen/Dispatch.h>

#include <cmath>

#include "runtime/fixed_order.h"

namespace birkhoff {

double gradient_norm(const GradBuckets& buckets) {
  double sum = 0;
  for (const auto& bucket : buckets.buckets()) {
    AT_DISPATCH_FLOATING_TYPES(bucket.gradients.scalar_type(), "gradient_norm", [&] {
      sum += sum_of_squares(bucket.gradients.const_data_ptr<scalar_t>(), bucket.elements());
    });
  }
  return std::sqrt(sum);
}

}  // namespace birkhoff
