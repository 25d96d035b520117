// The GPU kernels of clusters and of the choice of blocks follow the definition and are as exact as
// the reference.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "attention/kernels/block_top_k/block_top_k.h"
#include "attention/kernels/clusters/cluster_figures.h"
#include "attention/kernels/clusters/cluster_seeds.h"
#include "tests/attention/kernels/block_top_k/block_top_k_problem.h"
#include "tests/attention/kernels/clusters/clusters_problem.h"
#include "tests/attention/mechanisms/mechanism_cases.h"
#include "tests/kernel_error.h"

namespace birkhoff::test {
namespace {

constexpr at::ScalarType kRowDtypes[] = {at::kFloat, at::kBFloat16, at::kHalf};

ClusterProblem on_gpu(ClusterProblem problem) {
  problem.x_BHLD = problem.x_BHLD.detach().to(at::kCUDA).set_requires_grad(true);
  problem.centroids_HKD = problem.centroids_HKD.to(at::kCUDA);
  problem.documents.number_BL = problem.documents.number_BL.to(at::kCUDA);
  return problem;
}

ClusteredRows rows_on_gpu(const ClusterProblem& problem) {
  const ClusterProblem there = on_gpu(problem);
  EXPECT_EQ(choose_path(there, Path::kFused), Path::kFused);
  ClusteredRows rows = cluster_rows(there, Path::kFused);
  for (at::Tensor* x : {&rows.unit_BHLD, &rows.distance_BH, &rows.cluster_BHL, &rows.nearest_BHP,
                        &rows.nearest_ends_BHG}) {
    if (x->defined()) *x = x->detach().cpu();
  }
  return rows;
}

// Solves twice.
std::vector<at::Tensor> results_on_gpu(const ClusterProblem& problem) {
  const ClusterProblem there = on_gpu(problem);
  std::vector<at::Tensor> results = cluster_results(there, Path::kFused);
  const auto again = cluster_results(there, Path::kFused);
  for (std::size_t i = 0; i < results.size(); ++i) {
    expect_same_bits(results[i], again[i], "result " + std::to_string(i));
    results[i] = results[i].cpu();
  }
  return results;
}

void check(const ClusterSizes& sizes, at::ScalarType dtype) {
  SCOPED_TRACE(::testing::Message() << sizes << " " << at::toString(dtype));
  const ClusterProblem problem = cluster_problem(sizes, dtype);
  const ClusteredRows rows = rows_on_gpu(problem);
  expect_nearest(problem, rows);
  ASSERT_TRUE(at::equal(rows.cluster_BHL, cluster_rows(problem, Path::kReference).cluster_BHL));
  expect_as_exact_as_the_reference(problem, results_on_gpu(problem));
}

// Rows of any layout, and the ids of every second sample of a batch.
TEST(ClustersKernel, SmallSeedsAreThoseOfTheDefinition) {
  for (const at::ScalarType dtype : kRowDtypes) {
    const ClusterProblem problem = cluster_problem({2, 3, 45, 70, 33, 0, true, true}, dtype),
                         there = on_gpu(problem);
    ClusteredRows rows = cluster_rows(problem, Path::kReference), rows_there = rows;
    rows_there.unit_BHLD =
        rows.unit_BHLD.detach().to(at::kCUDA).transpose(1, 2).contiguous().transpose(1, 2);
    NoiseKey noise{.seed = 5,
                   .step = at::tensor({std::int64_t{8}}),
                   .layer = 2,
                   .sample_ids_B = at::arange(0, 4).slice(0, 0, 4, 2),
                   .global_batch = 5};
    const at::Tensor expected = draw_rows({problem, rows, noise, 3, 6}, Path::kReference);
    noise.step = noise.step.cuda();
    noise.sample_ids_B = at::arange(0, 4, at::kCUDA).slice(0, 0, 4, 2);
    const at::Tensor seeds = draw_rows({there, rows_there, noise, 3, 6}, Path::kFused);
    expect_same_bits(seeds.cpu(), expected, "seeds");
  }
}

// Also run under compute-sanitizer.
TEST(ClustersKernel, SmallAreThoseOfTheDefinition) {
  for (const ClusterSizes& sizes : kClusterSizes) {
    for (const at::ScalarType dtype : kRowDtypes) check(sizes, dtype);
  }
  for (const at::ScalarType dtype : kRowDtypes) check({2, 2, 70, 5, 65, 9, true, true}, dtype);
  expect_first_of_equal(rows_on_gpu(repeated_rows()));
}

TEST(ClustersKernel, SmallCountsAreThoseOfTheCpu) {
  for (const std::int64_t K : {7, 300, 4096, 4097}) {
    ClusterCounts counts{.cluster_BHL = at::randint(-1, K, {2, 3, 700}, at::kInt),
                         .before_BHM = at::randint(-1, K, {2, 3, 44}, at::kInt),
                         .compared = 16,
                         .idle_steps_HK = at::randint(0, 2, {3, K, 5}, at::kFloat).select(2, 4)};
    const at::Tensor expected = count_clusters(counts, Path::kFused);
    for (at::Tensor* x : {&counts.cluster_BHL, &counts.before_BHM, &counts.idle_steps_HK}) {
      *x = x->cuda();
    }
    EXPECT_TRUE(at::equal(count_clusters(counts, Path::kFused).cpu(), expected)) << K;
  }
}

TEST(ClustersKernel, ManyRows) { check({2, 1, 4000, 64, 40, 128, false, true}, at::kBFloat16); }

// Also run under compute-sanitizer.
TEST(BlockTopKKernel, SmallIsTheDefinition) {
  for (const at::ScalarType dtype : kRowDtypes) {
    for (const BlockTopK& choice : block_top_ks(dtype)) {
      BlockTopK there = choice;
      there.q_BHLD = choice.q_BHLD.to(at::kCUDA);
      there.k_BHLD = choice.k_BHLD.to(at::kCUDA);
      there.documents.number_BL = choice.documents.number_BL.to(at::kCUDA);
      EXPECT_EQ(choose_path(there, Path::kFused), Path::kFused);
      const at::Tensor chosen = select_top_blocks(there, Path::kFused);
      expect_blocks_of_the_definition(choice, chosen.cpu());
      expect_same_bits(chosen, select_top_blocks(there, Path::kFused), "again");
    }
  }
}

}  // namespace
}  // namespace birkhoff::test
