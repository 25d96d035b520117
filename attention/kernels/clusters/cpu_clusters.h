// clusters.h on the CPU. Legend: see there. S is the type of sums. Results have the same bits for
// any number of threads.
#pragma once

#include <ATen/core/Tensor.h>

#include "attention/kernels/clusters/clusters.h"

namespace birkhoff {

// Fills in `rows`; returns the inverse norms [B, H, L], in S; 0 for x = 0.
at::Tensor cluster_rows_on_cpu(const ClusterProblem& problem, ClusteredRows& rows);

struct ClusterGradientProblem {
  at::Tensor unit_BHLD, inverse_BHL, cluster_BHL, centroids_HKD;
  double length = 1;
  at::Tensor d_unit_BHLD, d_distance_BH;  // undefined: 0
};
// d_x_BHLD. With u = x / |x|, m its centroid and g the gradient of u,
//   g_d = length d_unit_d + 2 d_distance (u_d - m_d),   d_x_d = (g_d - u_d sum_e u_e g_e) / |x|.
at::Tensor cluster_gradients_on_cpu(const ClusterGradientProblem& problem);

at::Tensor cluster_sums_on_cpu(const ClusterProblem& problem, const ClusteredRows& rows);

}  // namespace birkhoff
