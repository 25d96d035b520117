// The GPU kernels of clusters, run on the CPU, agree with the CPU's kernels and are as exact as the
// reference. Legend: B batch, H heads, L rows, D head dim, K clusters.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "attention/kernels/clusters/cluster_figures.h"
#include "attention/kernels/clusters/cluster_seeds.h"
#include "attention/kernels/clusters/gpu_arguments.h"
#include "tests/attention/kernels/clusters/clusters_emulated.h"
#include "tests/attention/kernels/clusters/clusters_problem.h"
#include "tests/attention/mechanisms/mechanism_cases.h"
#include "tests/kernel_error.h"

namespace birkhoff::test {
namespace {

// More clusters than a chunk, tiles that are not full, documents of one row, and few columns.
// Blocks that choose the rows of documents, and of a second chunk; more rows of a cluster than a
// warp lists at a time.
const ClusterSizes kMoreSizes[] = {
    {2, 1, 45, 5, 65, 4, true, true},     {2, 1, 33, 64, 1, 8, false, true},
    {1, 1, 70, 20, 33, 70, true, false},  {1, 1, 256, 7, 2, 255, false, false},
    {1, 1, 4100, 3, 2, 700, true, false}, {1, 1, 1100, 3, 33, 9, false, false},
    {2, 1, 2500, 5, 1, 9, false, true}};

std::vector<ClusterSizes> all_sizes() {
  std::vector<ClusterSizes> sizes(std::begin(kClusterSizes), std::end(kClusterSizes));
  sizes.insert(sizes.end(), std::begin(kMoreSizes), std::end(kMoreSizes));
  return sizes;
}

// What the kernels write or read only after they wrote it, before they run.
void spoil(const at::Tensor& x, double with) {
  if (!x.defined()) return;
  if (x.is_floating_point()) {
    x.fill_(with);
  } else {
    x.fill_(with == 0 ? 0 : std::numeric_limits<std::int32_t>::max());
  }
}

ClusterForward emulate_forward(const ClusterProblem& problem, double before = NAN) {
  ClusterForward forward = cluster_forward(problem);
  const ClusteredRows& rows = forward.rows;
  for (const at::Tensor& x : {rows.unit_BHLD, rows.distance_BH, rows.cluster_BHL, rows.nearest_BHP,
                              forward.inverse_BHL, forward.scratch[0], forward.scratch.back()}) {
    spoil(x, before);
  }
  emulate_cluster_rows(forward.params);
  return forward;
}

at::Tensor emulate_backward(const ClusterProblem& problem, const ClusterForward& forward,
                            const ClusterWeights& weights) {
  const ClusterBackward backward = cluster_backward({.unit_BHLD = forward.rows.unit_BHLD,
                                                     .inverse_BHL = forward.inverse_BHL,
                                                     .cluster_BHL = forward.rows.cluster_BHL,
                                                     .centroids_HKD = problem.centroids_HKD,
                                                     .length = problem.length,
                                                     .d_unit_BHLD = weights.d_unit_BHLD,
                                                     .d_distance_BH = weights.d_distance_BH});
  spoil(backward.d_x_BHLD, NAN);
  emulate_cluster_gradients(backward.params);
  return backward.d_x_BHLD;
}

at::Tensor emulate_sums(const ClusterProblem& problem, const ClusteredRows& rows) {
  const ClusterSums sums = cluster_sums_of(problem, rows);
  spoil(sums.sums_BHKd, NAN);
  emulate_cluster_sums(sums.params);
  return sums.sums_BHKd.sum(0);
}

void check(const ClusterSizes& sizes, at::ScalarType dtype) {
  SCOPED_TRACE(::testing::Message() << sizes << " " << at::toString(dtype));
  const ClusterProblem problem = cluster_problem(sizes, dtype);
  ASSERT_EQ(why_not_gpu_kernels(problem), "");
  const ClusterForward forward = emulate_forward(problem);
  const ClusteredRows& rows = forward.rows;
  expect_nearest(problem, rows);
  ASSERT_TRUE(at::equal(rows.cluster_BHL, cluster_rows(problem, Path::kReference).cluster_BHL));
  expect_as_exact_as_the_reference(problem,
                                   {rows.unit_BHLD, rows.distance_BH, emulate_sums(problem, rows),
                                    emulate_backward(problem, forward, cluster_weights(problem))});
}

TEST(ClustersKernel, AreThoseOfTheDefinitionAndAsExactAsTheReference) {
  int number = 0;
  for (const ClusterSizes& sizes : all_sizes()) {
    check(sizes, at::kFloat);
    check(sizes, ++number % 2 == 0 ? at::kBFloat16 : at::kHalf);
  }
}

TEST(ClustersKernel, CountsAreThoseOfTheDefinition) {
  at::manual_seed(3);
  for (const std::int64_t K : {1, 9, 300, ClusterCountsParams::kMaxClusters}) {
    for (const std::int64_t L : {1, 16, 17, 700}) {
      constexpr std::int64_t kB = 2, kH = 3, kCompared = 16;
      const std::int64_t M = (L + kCompared - 1) / kCompared;
      const ClusterCounts counts{
          .cluster_BHL = at::randint(-1, std::min<std::int64_t>(K, 40), {kB, kH, L}, at::kInt),
          .before_BHM = at::randint(-1, std::min<std::int64_t>(K, 2), {kB, kH, M}, at::kInt),
          .compared = kCompared,
          // A part of a statistic's value, whose columns are not contiguous.
          .idle_steps_HK = at::randint(0, 2, {kH, K, 5}, at::kFloat).select(2, 4)};
      const at::Tensor expected = count_clusters(counts, Path::kReference),
                       of_heads = at::full({kB * kH, kNumClusterFigures}, -7, at::kInt);
      EXPECT_GT(expected[kComparedRows].item<float>(), 0);
      emulate_cluster_counts(cluster_counts_params(counts, of_heads));
      EXPECT_TRUE(at::equal(of_heads.sum(0).to(at::kFloat), expected)) << K << " " << L;
    }
  }
}

// Each rank of the tensor axis draws for its heads, and each data rank finds its samples' rows.
TEST(ClustersKernel, SeedsAreThoseOfTheDefinition) {
  int found = 0, missing = 0;
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const std::int64_t first_head : {0, 3}) {
      for (const std::int64_t first_sample : {0, 17}) {
        const ClusterProblem problem = cluster_problem({2, 3, 45, 70, 33, 0, true, true}, dtype);
        const ClusteredRows rows = cluster_rows(problem, Path::kReference);
        const NoiseKey noise{.seed = 5,
                             .step = at::tensor({std::int64_t{8}}),
                             .layer = 2,
                             .sample_ids_B = at::arange(first_sample, first_sample + 2),
                             .global_batch = 5};
        const ClusterDraw draw{problem, rows, noise, first_head, 6};
        const at::Tensor expected = draw_rows(draw, Path::kReference),
                         seeds = at::full_like(expected, NAN);
        emulate_cluster_seeds(cluster_seeds_params(draw, seeds));
        expect_same_bits(seeds, expected, "seeds");
        found += expected.ne(0).any(2).sum().item<int>();
        missing += expected.eq(0).all(2).sum().item<int>();
      }
    }
  }
  EXPECT_GT(found, 100);
  EXPECT_GT(missing, 100);
}

// Without a window no scores are stored, and all clusters are visited at once.
TEST(ClustersKernel, TheWindowDoesNotChangeClusters) {
  for (const ClusterSizes& sizes : {kMoreSizes[0], kMoreSizes[1]}) {
    ClusterProblem problem = cluster_problem(sizes, at::kFloat);
    const ClusterForward with = emulate_forward(problem);
    problem.window = 0;
    const ClusterForward without = emulate_forward(problem);
    EXPECT_FALSE(without.rows.nearest_BHP.defined());
    expect_same_bits(without.rows.cluster_BHL, with.rows.cluster_BHL, "clusters");
    expect_same_bits(without.rows.distance_BH, with.rows.distance_BH, "distances");
    expect_same_bits(without.rows.unit_BHLD, with.rows.unit_BHLD, "unit");
  }
}

TEST(ClustersKernel, UndefinedGradientsAreZero) {
  const ClusterProblem problem = cluster_problem({2, 2, 40, 33, 5, 0, false, true}, at::kFloat);
  const ClusterForward forward = emulate_forward(problem);
  const ClusterWeights weights = cluster_weights(problem);
  for (const bool of_unit : {false, true}) {
    ClusterWeights undefined = weights, zero = weights;
    (of_unit ? undefined.d_unit_BHLD : undefined.d_distance_BH).reset();
    at::Tensor& other = of_unit ? zero.d_unit_BHLD : zero.d_distance_BH;
    other = at::zeros_like(other);
    expect_same_bits(emulate_backward(problem, forward, undefined),
                     emulate_backward(problem, forward, zero), of_unit ? "unit" : "distance");
  }
}

TEST(ClustersKernel, TheFirstOfEqualScoresIsChosen) {
  expect_first_of_equal(emulate_forward(repeated_rows()).rows);
  // The squares of tiny numbers are 0, and so is 1 / |x|: scores are 0 and -0, which are equal.
  ClusterProblem tiny = cluster_problem({1, 1, 50, 1, 2, 3, false, false}, at::kFloat);
  tiny.x_BHLD = (at::arange(50).remainder(3) - 1).to(at::kFloat).view({1, 1, 50, 1}) * 1e-30;
  for (const ClusteredRows& rows : {emulate_forward(tiny).rows, cluster_rows(tiny, Path::kFused)}) {
    EXPECT_EQ(rows.cluster_BHL.abs().max().item<int>(), 0);
    EXPECT_EQ(segments_of(rows.nearest_BHP, rows.nearest_ends_BHG)[0],
              (std::vector<std::vector<int>>{{0, 1, 2}, {0, 1, 2}}));
  }
}

// As on the CPU: NaN is no cluster's best score unless all are NaN, and the highest of a cluster.
TEST(ClustersKernel, NaNIsAsOnTheCpu) {
  ClusterProblem problem = cluster_problem({1, 1, 70, 8, 40, 4, false, false}, at::kFloat);
  problem.x_BHLD = problem.x_BHLD.detach().clone();
  problem.x_BHLD[0][0][66].fill_(0);
  problem.x_BHLD[0][0][68][2].fill_(NAN);
  problem.centroids_HKD[0][0][1].fill_(NAN);
  problem.centroids_HKD[0][35][1].fill_(NAN);
  const ClusteredRows rows = emulate_forward(problem).rows,
                      expected = cluster_rows(problem, Path::kFused);
  EXPECT_TRUE(at::equal(rows.cluster_BHL, expected.cluster_BHL));
  EXPECT_EQ(segments_of(rows.nearest_BHP, rows.nearest_ends_BHG),
            segments_of(expected.nearest_BHP, expected.nearest_ends_BHG));
  EXPECT_EQ(rows.unit_BHLD[0][0][66].abs().max().item<float>(), 0);
  EXPECT_TRUE(rows.unit_BHLD[0][0][68].isnan().all().item<bool>());
  EXPECT_TRUE(rows.distance_BH.isnan().all().item<bool>());
}

// Blocks choose of equal scores, zeros and NaN what the CPU chooses, however many of the rows at
// the threshold are before a warp's own.
TEST(ClustersKernel, BlocksChooseTheFirstOfEqualScores) {
  for (const std::int64_t window : {1, 7, 500, 900, 1029}) {
    ClusterProblem problem = cluster_problem({1, 1, 1030, 4, 3, window, false, false}, at::kFloat);
    problem.x_BHLD = problem.x_BHLD.detach()
                         .index_select(2, at::arange(1030).square().remainder(7))
                         .index_fill(2, at::tensor({40, 1000}, at::kLong), 0)
                         .index_fill(2, at::tensor({333, 800}, at::kLong), NAN);
    const ClusteredRows rows = emulate_forward(problem).rows,
                        expected = cluster_rows(problem, Path::kFused);
    EXPECT_EQ(segments_of(rows.nearest_BHP, rows.nearest_ends_BHG),
              segments_of(expected.nearest_BHP, expected.nearest_ends_BHG))
        << window;
  }
}

// Nothing is read that the kernels have not written.
TEST(ClustersKernel, MemoryBeforeDoesNotMatter) {
  const ClusterProblem problem = cluster_problem({2, 1, 40, 5, 33, 4, true, true}, at::kBFloat16);
  const ClusterForward one = emulate_forward(problem), other = emulate_forward(problem, 0);
  const at::Tensor used_BHP =
      at::arange(one.rows.nearest_BHP.size(2)) <
      one.rows.nearest_ends_BHG.narrow(2, one.rows.nearest_ends_BHG.size(2) - 1, 1);
  expect_same_bits(one.rows.unit_BHLD, other.rows.unit_BHLD, "unit");
  expect_same_bits(one.rows.distance_BH, other.rows.distance_BH, "distance");
  expect_same_bits(one.rows.cluster_BHL, other.rows.cluster_BHL, "clusters");
  expect_same_bits(one.rows.nearest_BHP.masked_select(used_BHP),
                   other.rows.nearest_BHP.masked_select(used_BHP), "nearest");
}

}  // namespace
}  // namespace birkhoff::test
