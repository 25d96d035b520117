// Optimizers, which turn the reduced gradients in buckets into new parameter values.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "runtime/checkpoint/tensor_part.h"
#include "runtime/gradients/grad_buckets.h"
#include "runtime/optimizers/step_scalars.h"

namespace birkhoff::configs {
class Optimizer;
}

namespace birkhoff {

class Optimizer {
 public:
  virtual ~Optimizer() = default;

  // Updates the values that this rank owns (GradBucket::own_values) from their gradients times
  // scalars' kGradientScale. With kApply 0 nothing changes. Local: ranks that own the same element
  // do the same arithmetic on the same sums, so they stay equal. Call
  // GradBuckets::all_gather_parameters() next.
  virtual void step(const StepScalars& scalars) = 0;

  // The optimizer's state on this rank, as views of live memory: all of it, or with ZeRO only the
  // state of the values that the rank owns (owned_parts()), so ranks share the writing.
  virtual std::vector<TensorPart> state() = 0;
};

// The parts of a tensor with an element for each element of a slot that this rank owns: one for
// each rank's slice that holds some, or an empty one. A part's owner is the rank of the buckets'
// group to which that slice belongs. own_n: the elements for all that the rank owns of the bucket.
std::vector<TensorPart> owned_parts(const GradBuckets& buckets, const GradBucket& bucket,
                                    const GradBucket::Slot& slot, const std::string& name,
                                    StateKind kind, const at::Tensor& own_n);

// The optimizer that the configuration chooses; AdamW if it chooses none. `buckets` must outlive
// it.
std::unique_ptr<Optimizer> make_optimizer(const configs::Optimizer& config, GradBuckets& buckets);

}  // namespace birkhoff
