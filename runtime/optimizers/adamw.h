// AdamW (Loshchilov & Hutter 2019, "Decoupled weight decay regularization", algorithm 2), in
// PyTorch's arithmetic:
//
//   p <- p - lr wd p                       (only parameters with decay)
//   m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2
//   p <- p - lr / (1 - b1^t)  m / (sqrt(v / (1 - b2^t)) + epsilon)
//
// t counts the updates applied. One pass over each bucket reads gradient, value, m and v and writes
// the last three; on a GPU it is one launch of runtime/optimizers/gpu_adamw.cu.
#pragma once

#include "runtime/optimizers/optimizer.h"

namespace birkhoff::configs {
class AdamW;
}

namespace birkhoff {

class AdamW : public Optimizer {
 public:
  AdamW(const configs::AdamW& config, GradBuckets& buckets);
  // On a GPU: asynchronous on the current stream.
  void step(const StepScalars& scalars) override;
  std::vector<TensorPart> state() override;

 private:
  struct Moments {
    at::Tensor m, v;       // [elements of the bucket that this rank owns], of the parameters' dtype
    at::Tensor decayed_G;  // u8, only on a GPU: see FusedAdamWBucket
  };
  void step_on_host(const StepScalars& scalars);
  void step_on_gpu(const StepScalars& scalars);

  const double beta1_, beta2_, epsilon_, weight_decay_;
  GradBuckets& buckets_;
  std::vector<Moments> moments_;  // one per bucket
  at::Tensor num_updates_;        // fp64 [1]: t, on the parameters' device
};

}  // namespace birkhoff
