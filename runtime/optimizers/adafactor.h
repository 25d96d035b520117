// Adafactor (Shazeer & Stern 2018, "Adafactor: adaptive learning rates with sublinear memory cost",
// algorithm 4), without momentum, as in Tensor2Tensor:
//
//   b <- 1 - t^-c                                           (t counts the updates applied)
//   matrices:  R <- b R + (1 - b) mean_columns(g^2 + e1),  C <- b C + (1 - b) mean_rows(g^2 + e1)
//              u <- g / sqrt(R / mean(R)) / sqrt(C)
//   vectors:   V <- b V + (1 - b) (g^2 + e1),              u <- g / sqrt(V)
//   u <- u / max(1, rms(u) / clip_update)
//   p <- p - lr max(e2, rms(p)) u                           (without scale_by_parameter: p - lr u)
//
// Sums have a fixed order: the same bits for any number of threads. In a tensor of more than two
// dimensions the last two form the matrix, as in Tensor2Tensor.
#pragma once

#include "runtime/optimizers/optimizer.h"

namespace birkhoff::configs {
class Adafactor;
}

namespace birkhoff {

class Adafactor : public Optimizer {
 public:
  Adafactor(const configs::Adafactor& config, GradBuckets& buckets);
  void step(const StepScalars& scalars) override;
  std::vector<TensorPart> state() override;

 private:
  // A parameter: views of its slot, and its second moments.
  struct Entry {
    std::string name;
    int owner = 0;
    at::Tensor value, gradient;
    at::Tensor rows, columns;  // matrices: means over the other dimension
    at::Tensor full;           // vectors
  };
  void update(Entry& entry, const StepScalars& scalars, double beta);
  void update_on_gpu(Entry& entry, const StepScalars& scalars, double beta);

  const double decay_exponent_, clip_update_, epsilon1_, epsilon2_;
  const bool scale_by_parameter_;
  std::vector<Entry> entries_;
  at::Tensor change_;       // u of the entry being updated
  at::Tensor num_updates_;  // fp64 [1]: t
};

}  // namespace birkhoff
