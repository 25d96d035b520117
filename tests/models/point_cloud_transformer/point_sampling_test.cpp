// Farthest points, nearest points and rows against loops over all pairs.
//
// Legend: B batch, N points, P coordinates.
#include "models/point_cloud_transformer/point_sampling.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "tests/models/point_cloud_transformer/point_clouds.h"

namespace birkhoff {
namespace {

double square_distance(const at::Tensor& a_P, const at::Tensor& b_P) {
  double sum = 0;
  for (std::int64_t p = 0; p < a_P.size(0); ++p) {
    const double d = a_P[p].item<double>() - b_P[p].item<double>();
    sum += d * d;
  }
  return sum;
}

std::vector<std::int64_t> farthest_by_loops(const at::Tensor& points_NP, std::int64_t count) {
  std::vector<std::int64_t> kept = {0};
  while (std::ssize(kept) < count) {
    std::int64_t best = 0;
    double largest = -1;
    for (std::int64_t n = 0; n < points_NP.size(0); ++n) {
      double nearest = INFINITY;
      for (const std::int64_t k : kept)
        nearest = std::min(nearest, square_distance(points_NP[n], points_NP[k]));
      if (nearest > largest) {
        largest = nearest;
        best = n;
      }
    }
    kept.push_back(best);
  }
  return kept;
}

std::vector<std::int64_t> values_in(const at::Tensor& index) {
  const at::Tensor flat = index.contiguous();
  return {flat.const_data_ptr<std::int64_t>(), flat.const_data_ptr<std::int64_t>() + flat.numel()};
}

TEST(PointSampling, FarthestPointsAreThoseOfLoops) {
  for (const std::int64_t N : {1, 5, 24}) {
    for (const std::int64_t P : {1, 2, 3}) {
      const at::Tensor points_BNP = values_of({3, N, P}, N + P);
      for (const std::int64_t count : {std::int64_t{1}, (N + 1) / 2, N}) {
        const at::Tensor kept_BS = farthest_points(points_BNP, count);
        for (std::int64_t b = 0; b < 3; ++b)
          EXPECT_EQ(values_in(kept_BS[b]), farthest_by_loops(points_BNP[b], count))
              << N << " " << P;
      }
    }
  }
}

// Of equal points each is kept at most once before all places are taken, in their order.
TEST(PointSampling, EqualPointsAreTakenInTheirOrder) {
  EXPECT_EQ(values_in(farthest_points(at::tensor({0., 2., 0., 2., 1.}).view({1, 5, 1}), 3)[0]),
            (std::vector<std::int64_t>{0, 1, 4}));
}

TEST(PointSampling, OtherOrdersKeepTheSamePoints) {
  const at::Tensor points_BNP = values_of({2, 24, 3}, 5);
  const at::Tensor order =
      at::cat({at::zeros({1}, at::kLong), (at::arange(23, at::kLong) * 5).remainder(23) + 1});
  const at::Tensor permuted_BNP = points_BNP.index_select(1, order);
  EXPECT_TRUE(at::equal(rows_at(points_BNP, farthest_points(points_BNP, 10)),
                        rows_at(permuted_BNP, farthest_points(permuted_BNP, 10))));
}

TEST(PointSampling, NearestPointsAreThoseOfLoops) {
  const at::Tensor points_BNP = values_of({2, 20, 3}, 3),
                   centers_BSP = at::cat({points_BNP.narrow(1, 4, 3), values_of({2, 2, 3}, 8)}, 1);
  for (const std::int64_t count : {1, 6, 20}) {
    const at::Tensor near_BSK = nearest_points(points_BNP, centers_BSP, count);
    for (std::int64_t b = 0; b < 2; ++b) {
      for (std::int64_t s = 0; s < 5; ++s) {
        std::vector<std::int64_t> expected(20);
        std::iota(expected.begin(), expected.end(), 0);
        const auto distance = [&](std::int64_t n) {
          return square_distance(points_BNP[b][n], centers_BSP[b][s]);
        };
        std::ranges::sort(expected, {}, distance);
        expected.resize(static_cast<std::size_t>(count));
        EXPECT_EQ(values_in(near_BSK[b][s]), expected);
      }
    }
    EXPECT_EQ(values_in(near_BSK[0].narrow(0, 0, 3).select(1, 0)), values_in(at::arange(4, 7)));
  }
}

TEST(PointSampling, RowsAndTheirGradientsAreThoseOfLoops) {
  const at::Tensor x_BNC = values_of({2, 6, 4}, 1).set_requires_grad(true);
  const at::Tensor index_BSK =
      at::tensor({5, 0, 0, 3, 1, 5, 2, 2, 2, 4, 0, 1}, at::kLong).view({2, 3, 2});
  const at::Tensor rows_BSKC = rows_at(x_BNC, index_BSK), k_BSKC = values_of({2, 3, 2, 4}, 6);
  (rows_BSKC * k_BSKC).sum().backward();
  at::Tensor expected_BNC = at::zeros({2, 6, 4}, at::kDouble);
  for (std::int64_t b = 0; b < 2; ++b) {
    for (std::int64_t s = 0; s < 3; ++s) {
      for (std::int64_t k = 0; k < 2; ++k) {
        const auto n = index_BSK[b][s][k].item<std::int64_t>();
        EXPECT_TRUE(at::equal(rows_BSKC[b][s][k], x_BNC[b][n]));
        expected_BNC[b][n] += k_BSKC[b][s][k];
      }
    }
  }
  EXPECT_LT(most_different(x_BNC.grad(), expected_BNC), 1e-15);
}

}  // namespace
}  // namespace birkhoff
