// The centroids of routing attention against values computed by hand; routing_test.cpp has the
// tests that need attention.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "attention/mechanisms/routing/centroids.h"
#include "tests/attention/mechanisms/mechanism_cases.h"

namespace birkhoff::test {
namespace {

// Two updates of three centroids in two dimensions, by hand.
TEST(Centroids, TwoUpdatesByHand) {
  Parameters parameters(1, at::kDouble);
  const Centroids centroids({.clusters = 3, .decay = 0.75, .reseed_after = 0}, 1, 2, "a",
                            parameters);
  const Statistic& statistic = parameters.statistics().at(0);
  EXPECT_EQ(statistic.name, "a.centroids");
  at::Tensor value = statistic.value;
  value.copy_(at::tensor({1.,  0., 1.,  0., 1., 1., 0.,  //
                          0.,  1., 0.,  1., 1., 1., 0.,  //
                          -1., 0., -1., 0., 1., 1., 0.})
                  .view({1, 3, 7}));
  // Two rows (0, 1) and (0, 2) / 2 in cluster 0; none in 1; (-1, 0) four times in 2.
  const at::Tensor sums = at::tensor({0., 2., 2., 0., 0.,  //
                                      0., 0., 0., 0., 0.,  //
                                      -4., 0., 4., 0., 0.})
                              .view({1, 3, 5});
  value.copy_(statistic.update(value, sums));
  // s_0 = 0.75 (1, 0) + 0.25 (0, 2) = (0.75, 0.5); |s_0| = sqrt(0.8125).
  const double norm = std::sqrt(0.8125);
  const at::Tensor once = at::tensor({0.75 / norm, 0.5 / norm, 1.,  0., norm, 1.25, 0.,  //
                                      0.,          1.,         0.,  1., 0.75, 0.75, 1.,  //
                                      -1.,         0.,         -1., 0., 1.75, 1.75, 0.})
                              .view({1, 3, 7});
  EXPECT_LE(max_difference(value, once), 1e-15);
  EXPECT_EQ(centroids.idle_steps()[0][1].item<double>(), 1);
  value.copy_(statistic.update(value, sums));
  // s_0 = 0.75 (0.75, 0.5) + 0.25 (0, 2) = (0.5625, 0.875).
  const double second = std::sqrt(0.5625 * 0.5625 + 0.875 * 0.875);
  const at::Tensor twice = at::tensor({0.5625 / second,
                                       0.875 / second,
                                       0.75 / norm,
                                       0.5 / norm,
                                       second,
                                       1.4375,
                                       0.,  //
                                       0.,
                                       1.,
                                       0.,
                                       1.,
                                       0.5625,
                                       0.5625,
                                       2.,  //
                                       -1.,
                                       0.,
                                       -1.,
                                       0.,
                                       2.3125,
                                       2.3125,
                                       0.})
                               .view({1, 3, 7});
  EXPECT_LE(max_difference(value, twice), 1e-15);
}

TEST(Centroids, StartAsUnitVectorsWithCountOne) {
  Parameters parameters(1, at::kFloat);
  const Centroids centroids({.clusters = 5, .decay = 0.9, .reseed_after = 1}, 2, 8, "a",
                            parameters);
  EXPECT_LE(max_difference(centroids.directions().square().sum(2), at::ones({2, 5})), 1e-6);
  EXPECT_TRUE(at::equal(centroids.directions(), centroids.previous()));
  EXPECT_TRUE(at::equal(parameters.statistics().at(0).value.select(2, 17), at::ones({2, 5})));
  EXPECT_TRUE(at::equal(centroids.idle_steps(), at::zeros({2, 5})));
}

// One head with centroids along both axes and opposite to the first; then with 17 clusters.
TEST(Centroids, DescribeThemselves) {
  const at::Tensor value = at::tensor({1.,  0., 1.,  0., 1., 2., 0.,  //
                                       0.,  1., 0.,  1., 1., 1., 3.,  //
                                       -1., 0., -1., 0., 1., 5., 0.})
                               .view({1, 3, 7});
  EXPECT_EQ(
      Centroids::describe(value),
      "  head 0: moving averages of the rows in a step 2, 1, 5 (they start at 1); 1 of 3 "
      "clusters had none in the last step; the largest has 62.5 % of the rows; angles between "
      "centroids 90.0 to 180.0 degrees, median 90.0\n");
  const at::Tensor many = value.narrow(1, 0, 1).repeat({1, 17, 1});
  many.select(2, 5).copy_(at::arange(1, 18, at::kDouble));
  EXPECT_THAT(
      Centroids::describe(many),
      ::testing::StartsWith("  head 0: moving averages of the rows in a step 1 to 17, median "
                            "9 (they start at 1); 0 of 17"));
}

}  // namespace
}  // namespace birkhoff::test
