// An optimizer that treats each element by itself (runtime/optimizers/update_rules.h): AdamW or
// SGD. One pass over each bucket reads gradient, value and state of each element and writes the
// last two; on a GPU it is one launch of runtime/optimizers/gpu_fused_update.cu.
#pragma once

#include <vector>

#include "runtime/optimizers/gpu_fused_update.h"
#include "runtime/optimizers/optimizer.h"

namespace birkhoff {

template <typename Rule>
class FusedOptimizer : public Optimizer {
 public:
  // `buckets` must outlive it.
  FusedOptimizer(const Rule& rule, GradBuckets& buckets);
  // On a GPU: asynchronous on the current stream.
  void step(const StepScalars& scalars) override;
  std::vector<TensorPart> state() override;

 private:
  void step_on_host(const StepScalars& scalars);
  void step_on_gpu(const StepScalars& scalars);

  const Rule rule_;
  GradBuckets& buckets_;
  // One per bucket: of the elements that this rank owns, without values and gradients; decayed_G
  // only on a GPU.
  std::vector<FusedBucket> states_;
  at::Tensor num_updates_;  // fp64 [1]: of the updates applied, on the parameters' device
};

extern template class FusedOptimizer<AdamWRule>;
extern template class FusedOptimizer<SgdRule>;

}  // namespace birkhoff
