// The centroids of routing attention: online k-means over the steps of training, on unit vectors
// (Roy et al. 2021, section 4.1). A statistic: every rank has the same, from sums over the global
// batch.
//
// With S_c the sum of the unit vectors x / |x| of a step in cluster c, n_c their count, m_c the
// centroid, r_c a mass and w the decay:
//   s_c = w r_c m_c + (1 - w) S_c,   m_c <- s_c / |s_c|,   r_c <- |s_c|,
//   count_c <- w count_c + (1 - w) n_c,
// from r_c = count_c = 1. A centroid without a row keeps its direction. Published code starts from
// count 0, which moves a centroid without a row in the first step far away, and does not
// renormalize.
//
// A centroid that had no row for `reseed_after` steps becomes one row of the step's global batch:
// a row that the noise of (step, layer, head, cluster) chooses, whichever rank has it.
//
// Legend: B batch, H heads, L rows, D head dim, K clusters.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "attention/kernels/clusters/clusters.h"
#include "cluster/base/random/philox.h"
#include "cluster/base/tensors/parameters.h"

namespace birkhoff {

class Centroids {
 public:
  // The name of the statistic, after the mechanism's prefix, and of its sums: cluster_sums()
  // [H, K, D + 1], then new_seeds() [H, K, D].
  static constexpr const char* kName = "centroids";

  struct Options {
    std::int64_t clusters = 0;
    double decay = 0;
    std::int64_t reseed_after = 0;  // steps; 0: never
  };
  Centroids(const Options& options, std::int64_t heads, std::int64_t head_dim,
            const std::string& prefix, Parameters& parameters);

  // [H, K, D], unit vectors: the current ones, and the ones before the last update.
  at::Tensor directions() const { return value_HKV_.narrow(2, 0, head_dim_); }
  at::Tensor previous() const { return value_HKV_.narrow(2, head_dim_, head_dim_); }
  // [H, K]: steps since the last row.
  at::Tensor idle_steps() const { return value_HKV_.select(2, 2 * head_dim_ + 2); }

  // For each head: the moving averages of rows per step (EMA counts; for more than 16 clusters
  // their range and median), clusters without a row in the last step, the largest share of the
  // rows, and the angles between centroids. Of a statistic's value.
  static std::string describe(const at::Tensor& value_HKV);

  // The unit vectors of the rows that reseeding would take, if they are in this batch; else zeros.
  at::Tensor new_seeds(const ClusterProblem& problem, const ClusteredRows& rows,
                       const NoiseKey& noise, Path limit) const;

 private:
  std::int64_t head_dim_, first_head_, all_heads_;  // heads of all ranks of the tensor axis
  // Direction [D], previous direction [D], mass, count, idle steps.
  at::Tensor value_HKV_;
};

}  // namespace birkhoff
