// The backward pass of cluster_rows(), for CPU and GPU. Legend: see clusters.h.
#pragma once

#include <ATen/core/Tensor.h>

namespace birkhoff {

// The operands of d_x_BHLD. With u = x / |x|, m its centroid and g the gradient of u,
//   g_d = length d_unit_d + 2 d_distance (u_d - m_d),   d_x_d = (g_d - u_d sum_e u_e g_e) / |x|.
struct ClusterGradientProblem {
  at::Tensor unit_BHLD;  // length u
  at::Tensor inverse_BHL, cluster_BHL, centroids_HKD;
  double length = 1;
  at::Tensor d_unit_BHLD, d_distance_BH;  // undefined: 0
};

}  // namespace birkhoff
