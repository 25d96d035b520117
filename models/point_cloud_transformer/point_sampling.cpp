#include "models/point_cloud_transformer/point_sampling.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/zeros.h>

#include <limits>

namespace birkhoff {
namespace {

// Squared distances [B, S, N], one coordinate after another: no tensor has all differences, and no
// product cancels.
at::Tensor square_distances(const at::Tensor& centers_BSP, const at::Tensor& points_BNP) {
  at::Tensor sum_BSN;
  for (std::int64_t p = 0; p < points_BNP.size(2); ++p) {
    const at::Tensor square_BSN =
        (centers_BSP.select(2, p).unsqueeze(2) - points_BNP.select(2, p).unsqueeze(1)).square_();
    sum_BSN = sum_BSN.defined() ? sum_BSN.add_(square_BSN) : square_BSN;
  }
  return sum_BSN;
}

}  // namespace

at::Tensor farthest_points(const at::Tensor& points_BNP, std::int64_t count) {
  const at::NoGradGuard no_grad;
  const std::int64_t B = points_BNP.size(0);
  const at::TensorOptions indices = points_BNP.options().dtype(at::kLong);
  const at::Tensor kept_BS = at::empty({B, count}, indices);
  at::Tensor next_B1 = at::zeros({B, 1}, indices);
  at::Tensor distance_B1N = at::full({B, 1, points_BNP.size(1)},
                                     std::numeric_limits<double>::infinity(), points_BNP.options());
  for (std::int64_t s = 0; s < count; ++s) {
    kept_BS.narrow(1, s, 1).copy_(next_B1);
    distance_B1N =
        at::minimum(distance_B1N, square_distances(rows_at(points_BNP, next_B1), points_BNP));
    next_B1 = distance_B1N.argmax(2);
  }
  return kept_BS;
}

at::Tensor nearest_points(const at::Tensor& points_BNP, const at::Tensor& centers_BSP,
                          std::int64_t count) {
  const at::NoGradGuard no_grad;
  return std::get<1>(at::topk(square_distances(centers_BSP, points_BNP), count, /*dim=*/2,
                              /*largest=*/false, /*sorted=*/true));
}

at::Tensor rows_at(const at::Tensor& x_BNC, const at::Tensor& index) {
  const std::int64_t B = x_BNC.size(0), N = x_BNC.size(1);
  std::vector<std::int64_t> shape(static_cast<std::size_t>(index.dim()), 1);
  shape[0] = B;
  const at::Tensor first = (at::arange(B, index.options()) * N).view(shape);
  // An embedding: unlike other ways to gather, its backward pass needs no atomics.
  return at::embedding(x_BNC.reshape({B * N, x_BNC.size(2)}), index + first);
}

}  // namespace birkhoff
