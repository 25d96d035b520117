// Optimizers: from reduced gradients in buckets to new parameter values.
#pragma once

#include <memory>
#include <vector>

#include "runtime/checkpoint/named_shard.h"
#include "runtime/gradients/grad_buckets.h"
#include "runtime/optimizers/step_scalars.h"

namespace birkhoff::configs {
class Optimizer;
}

namespace birkhoff {

class Optimizer {
 public:
  virtual ~Optimizer() = default;

  // Updates the values that the buckets hold (GradBuckets::held) from their gradients times
  // scalars' kGradientScale. With kApply 0 nothing changes. Local: ranks that hold an element do
  // the same arithmetic on the same sums, so all stay equal; GradBuckets::publish_values() comes
  // next.
  virtual void step(const StepScalars& scalars) = 0;

  // All that the optimizer remembers on this rank, as views of live memory: everything, or with
  // ZeRO what belongs to the values it holds. The owner of a shard is the rank (of the buckets'
  // group, which is the world while the other axes are 1) whose slice of the bucket it lies in, so
  // that ranks share the writing.
  virtual std::vector<NamedShard> state() = 0;
};

// The optimizer the configuration chooses; AdamW where it chooses none. `buckets` must outlive it.
std::unique_ptr<Optimizer> make_optimizer(const configs::Optimizer& config, GradBuckets& buckets);

}  // namespace birkhoff
