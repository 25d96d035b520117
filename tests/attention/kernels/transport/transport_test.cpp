// Optimal transport. Legend: R sources, C targets, M costs, P the plan.
#include "attention/kernels/transport/transport.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "attention/kernels/sinkhorn/sinkhorn.h"
#include "cluster/base/error.h"
#include "tests/attention/mechanisms/mechanism_cases.h"

namespace birkhoff::test {
namespace {

using testing::HasSubstr;

at::Tensor vector(std::vector<double> values) { return at::tensor(values, at::kDouble); }

// The distribution problem of five factories and five regions, whose optimal cost is 0.95.
Transport factories(double regularization, double tolerance) {
  const at::Tensor index = at::arange(5, at::kDouble);
  return {.cost_RC = (index.unsqueeze(1) - index).abs(),
          .source_R = vector({0.1, 0.2, 0.4, 0.2, 0.1}),
          .target_C = vector({0.05, 0.05, 0.2, 0.3, 0.4}),
          .regularization = regularization,
          .tolerance = tolerance};
}

Transport random_problem(std::int64_t sources, std::int64_t targets, std::uint64_t seed) {
  const at::Tensor source_R = random_tensor({sources}, at::kDouble, seed).exp(),
                   target_C = random_tensor({targets}, at::kDouble, seed + 1).exp();
  return {.cost_RC = random_tensor({sources, targets}, at::kDouble, seed + 2),
          .source_R = source_R,
          .target_C = target_C * (source_R.sum() / target_C.sum())};
}

TEST(Transport, IterationsAndCostsAreThoseOfTheOrdinaryAlgorithm) {
  struct Golden {
    double regularization, tolerance;
    std::int64_t iterations;
    double cost;
  };
  for (const Golden& golden : std::vector<Golden>{{0.01, 1e-4, 364, 0.949787},
                                                  {0.01, 1e-8, 377, 0.950000},
                                                  {0.1, 1e-4, 43, 0.949791},
                                                  {0.1, 1e-8, 56, 0.950000},
                                                  {1, 1e-8, 13, 1.067996}}) {
    const TransportPlan plan = solve_transport(factories(golden.regularization, golden.tolerance));
    EXPECT_TRUE(plan.converged);
    EXPECT_EQ(plan.iterations, golden.iterations) << golden.regularization;
    EXPECT_NEAR(plan.cost, golden.cost, 5e-7) << golden.regularization;
  }
}

// Costs without their absolute value, j - i: every plan costs the same, and entropy decides.
TEST(Transport, SeparableCostsGiveTheProductOfTheMassesAtOnce) {
  Transport problem = factories(0.05, 1e-8);
  const at::Tensor index = at::arange(5, at::kDouble);
  problem.cost_RC = index - index.unsqueeze(1);
  const TransportPlan plan = solve_transport(problem);
  EXPECT_EQ(plan.iterations, 1);
  EXPECT_NEAR(plan.cost, 0.95, 1e-12);
  EXPECT_LE(max_difference(plan.p_RC, problem.source_R.unsqueeze(1) * problem.target_C), 1e-14);
}

// exp(-M / 0.001) is 0 in fp64 for M above 0.745: without logarithms there would be no sums.
TEST(Transport, ASmallRegularizationDoesNotUnderflow) {
  const TransportPlan plan = solve_transport(factories(0.001, 1e-8));
  EXPECT_TRUE(plan.converged);
  EXPECT_EQ(plan.iterations, 3583);
  EXPECT_NEAR(plan.cost, 0.95, 5e-8);
  EXPECT_LE(plan.source_error, 1e-8);
  EXPECT_LE(plan.target_error, 1e-13);
}

TEST(Transport, ScalingReachesTheSamePlanInFewerIterations) {
  Transport problem = factories(0.001, 1e-9);
  const TransportPlan plain = solve_transport(problem);
  problem.scales = true;
  const TransportPlan scaled = solve_transport(problem);
  EXPECT_TRUE(scaled.converged);
  EXPECT_LT(scaled.iterations, 100);
  EXPECT_GT(plain.iterations, 3000);
  EXPECT_LE(max_difference(plain.p_RC, scaled.p_RC), 1e-7);
  EXPECT_EQ(scaled.source_errors.size(), static_cast<std::size_t>(scaled.iterations));
}

// The conditions of the optimum: the sums, and log P + M / reg = f_r + g_c.
TEST(Transport, ARectangularPlanMeetsTheConditionsOfTheOptimum) {
  for (const auto& [sources, targets] : {std::pair{3, 8}, {8, 3}, {1, 4}, {4, 1}, {6, 6}}) {
    Transport problem = random_problem(sources, targets, 7);
    problem.regularization = 0.3;
    problem.tolerance = 1e-12;
    const TransportPlan plan = solve_transport(problem);
    ASSERT_TRUE(plan.converged);
    const double total = problem.source_R.sum().item<double>();
    EXPECT_LE(max_difference(plan.p_RC.sum(1), problem.source_R), 1e-11 * total);
    EXPECT_LE(max_difference(plan.p_RC.sum(0), problem.target_C), 1e-13 * total);
    const at::Tensor sum_RC = plan.p_RC.log() + problem.cost_RC / problem.regularization;
    const at::Tensor mixed_RC = sum_RC - sum_RC.narrow(0, 0, 1) - sum_RC.narrow(1, 0, 1) +
                                sum_RC.narrow(0, 0, 1).narrow(1, 0, 1);
    EXPECT_LE(mixed_RC.abs().max().item<double>(), 1e-12);
    EXPECT_NEAR(plan.cost, (plan.p_RC * problem.cost_RC).sum().item<double>(), 1e-12 * total);
  }
}

TEST(Transport, UnitMassesGiveTheBalance) {
  const at::Tensor scores_RC = random_tensor({6, 6}, at::kDouble, 3);
  const at::Tensor ones = at::ones({6}, at::kDouble);
  for (const std::int64_t iterations : {1, 4, 9}) {
    // The balance begins with columns, transport with rows.
    const TransportPlan plan = solve_transport({.cost_RC = -scores_RC.t(),
                                                .source_R = ones,
                                                .target_C = ones,
                                                .regularization = 1,
                                                .tolerance = 1e-300,
                                                .max_iterations = iterations});
    EXPECT_FALSE(plan.converged);
    EXPECT_EQ(plan.iterations, iterations);
    EXPECT_LE(max_difference(plan.p_RC.t(), balance(scores_RC, iterations, Path::kReference)),
              1e-14);
  }
}

TEST(Transport, TheCostFallsWithTheRegularization) {
  Transport problem = random_problem(5, 7, 21);
  problem.tolerance = 1e-10;
  problem.scales = true;
  double before = std::numeric_limits<double>::infinity();
  for (const double regularization : {10.0, 1.0, 0.3, 0.1, 0.03}) {
    problem.regularization = regularization;
    const TransportPlan plan = solve_transport(problem);
    ASSERT_TRUE(plan.converged);
    EXPECT_LT(plan.cost, before);
    before = plan.cost;
  }
}

TEST(Transport, ASmallerToleranceTakesMoreIterationsToASmallerError) {
  std::int64_t before = 0;
  for (const double tolerance : {1e-2, 1e-4, 1e-6, 1e-8}) {
    const TransportPlan plan = solve_transport(factories(0.1, tolerance));
    EXPECT_LE(plan.source_error, tolerance * (1 + 1e-6));
    EXPECT_GT(plan.source_errors[plan.source_errors.size() - 2], tolerance);
    EXPECT_GT(plan.iterations, before);
    before = plan.iterations;
  }
}

TEST(Transport, ASmallRegularizationFindsTheBestPermutation) {
  constexpr std::int64_t kSize = 6;
  for (std::uint64_t seed = 0; seed < 5; ++seed) {
    const at::Tensor cost_RC = random_tensor({kSize, kSize}, at::kDouble, 40 + seed),
                     ones = at::ones({kSize}, at::kDouble);
    const TransportPlan plan = solve_transport({.cost_RC = cost_RC,
                                                .source_R = ones,
                                                .target_C = ones,
                                                .regularization = 1e-3,
                                                .scales = true});
    ASSERT_TRUE(plan.converged) << seed;
    std::vector<std::int64_t> order(kSize), best;
    std::iota(order.begin(), order.end(), 0);
    double least = std::numeric_limits<double>::infinity();
    const auto cost = cost_RC.accessor<double, 2>();
    do {
      double sum = 0;
      for (std::int64_t r = 0; r < kSize; ++r) sum += cost[r][order[static_cast<std::size_t>(r)]];
      if (sum < least) least = sum, best = order;
    } while (std::next_permutation(order.begin(), order.end()));
    const at::Tensor permutation_RC = at::one_hot(at::tensor(best, at::kLong), kSize);
    EXPECT_LE(max_difference(plan.p_RC, permutation_RC.to(at::kDouble)), 1e-2) << seed;
    EXPECT_NEAR(plan.cost, least, 1e-2) << seed;
  }
}

TEST(Transport, MassesOf0GetNothing) {
  Transport problem = random_problem(4, 3, 5);
  problem.regularization = 0.5;
  problem.source_R = vector({1, 0, 2, 0});
  problem.target_C = vector({0, 2.5, 0.5});
  for (const bool scales : {false, true}) {
    problem.scales = scales;
    const TransportPlan plan = solve_transport(problem);
    EXPECT_TRUE(plan.converged);
    EXPECT_LE(max_difference(plan.p_RC.sum(1), problem.source_R), 1e-5);
    EXPECT_EQ(plan.p_RC.select(0, 1).abs().sum().item<double>(), 0);
    EXPECT_EQ(plan.p_RC.select(1, 0).abs().sum().item<double>(), 0);
  }
}

TEST(Transport, TheLimitOfIterationsIsReported) {
  Transport problem = factories(0.01, 1e-4);
  problem.max_iterations = 363;
  TransportPlan plan = solve_transport(problem);
  EXPECT_FALSE(plan.converged);
  EXPECT_EQ(plan.iterations, 363);
  EXPECT_GT(plan.source_error, 1e-4);
  problem.max_iterations = 3;  // at a larger regularization
  problem.scales = true;
  plan = solve_transport(problem);
  EXPECT_FALSE(plan.converged);
  EXPECT_EQ(plan.iterations, 3);
  EXPECT_LE(plan.target_error, 1e-14);
}

TEST(Transport, ProblemsWithoutAPlanAreRefused) {
  const double kNan = std::numeric_limits<double>::quiet_NaN(),
               kInfinity = std::numeric_limits<double>::infinity();
  const auto refused = [](const Transport& problem, ExitCode code, const std::string& words) {
    try {
      solve_transport(problem);
      ADD_FAILURE() << "accepted: " << words;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code) << error.what();
      EXPECT_THAT(error.what(), HasSubstr(words));
    }
  };
  const Transport good = factories(0.01, 1e-4);
  for (const double value : {kNan, kInfinity, -kInfinity}) {
    Transport bad = good;
    bad.cost_RC = good.cost_RC.clone();
    bad.cost_RC[1][3] = value;
    refused(bad, ExitCode::kData, "the cost from source 2 to target 4 is");
  }
  for (const double value : {kNan, kInfinity, -0.5}) {
    Transport bad = good;
    bad.target_C = good.target_C.clone();
    bad.target_C[4] = value;
    refused(bad, ExitCode::kData, "target mass 5 of 5 is");
  }
  Transport bad = good;
  bad.source_R = good.source_R * 1.001;
  refused(bad, ExitCode::kData, "the source masses add up to 1.001");
  bad.source_R = bad.target_C = at::zeros({5}, at::kDouble);
  refused(bad, ExitCode::kData, "the total of the source masses is 0");
  bad = good;
  bad.regularization = 1e-13;
  refused(bad, ExitCode::kUsage, "use a larger regularization");
}

}  // namespace
}  // namespace birkhoff::test
