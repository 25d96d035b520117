// Batch norm (Ioffe & Szegedy 2015) over the global batch: ranks exchange their statistics, so the
// results are those of one rank with the whole batch, up to rounding.
//
// With mean m_c and variance v_c of x_rc over the rows r of all ranks,
//   y_rc = w_c (x_rc - m_c) / sqrt(v_c + epsilon) + b_c.
// Each rank computes its count, mean and sum of squared deviations; these are merged in fp64, in
// rank order (Chan et al. 1983), which does not cancel as sums of squares do. Evaluation uses
// running statistics r <- (1 - momentum) r + momentum (m, v n / (n - 1)), a Statistic.
//
// Legend: C channels, R rows of this rank, ... leading dims.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "cluster/base/collectives/process_group.h"
#include "cluster/base/tensors/named_sums.h"
#include "cluster/base/tensors/parameters.h"

namespace birkhoff {

// (x - m) / sqrt(v + epsilon), and the statistics.
struct NormalizedRows {
  at::Tensor x_RC;              // differentiable; its backward pass is collective, too
  at::Tensor mean_variance_2C;  // fp64; the variance is the unbiased one
};
// Of x [R, C], which has a row on some rank. Collective over `group`; null: one rank.
NormalizedRows normalize_over_batch(const at::Tensor& x_RC, double epsilon, ProcessGroup* group);

class BatchNorm {
 public:
  // momentum: the weight of a step in the running statistics.
  BatchNorm(std::int64_t channels, double epsilon, double momentum, const std::string& name,
            Parameters& parameters);

  // [..., C], in the parameters' dtype, for x [..., C]. In training it is collective over the
  // data-parallel ranks, as is its backward pass, and appends the sums of the running statistics.
  at::Tensor operator()(const at::Tensor& x, bool training, NamedSums& sums) const;

 private:
  double epsilon_;
  std::string name_;  // of the running statistics
  ProcessGroup* group_;
  at::Tensor weight_C, bias_C, running_2C;
};

}  // namespace birkhoff
