// The choice of points in a set: which ones to keep, and their neighbors (Qi et al. 2017,
// "PointNet++", section 3.2). On any device, from distances computed coordinate by coordinate.
//
// Legend: B batch, N points, P coordinates, S kept points, K neighbors, C channels.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace birkhoff {

// Farthest-point sampling, [B, S] int64: the first point of the set, then each time the point whose
// nearest kept point is farthest, the first one among equals. S is at most N. The chosen points
// depend on the order of points only through the first one, and through equal distances.
at::Tensor farthest_points(const at::Tensor& points_BNP, std::int64_t count);

// The K nearest of the points for each center, [B, S, K] int64, nearest first; a center that is one
// of the points is its own neighbor. K is at most N.
at::Tensor nearest_points(const at::Tensor& points_BNP, const at::Tensor& centers_BSP,
                          std::int64_t count);

// Rows of x at index [B, S] or [B, S, K]: [B, S, C] or [B, S, K, C]. The gradient adds up in a
// fixed order.
at::Tensor rows_at(const at::Tensor& x_BNC, const at::Tensor& index);

}  // namespace birkhoff
