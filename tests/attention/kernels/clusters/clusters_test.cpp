// Clusters of unit vectors: the CPU kernels against the reference, and both against loops.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "attention/kernels/clusters/cluster_lists.h"
#include "attention/kernels/clusters/clusters.h"
#include "tests/attention/kernels/clusters/clusters_problem.h"
#include "tests/attention/mechanisms/mechanism_cases.h"

namespace birkhoff::test {
namespace {

// Clusters and nearest rows by the definition, from scores in fp64 of the same numbers.
TEST(Clusters, AreNearestCentroidsAndNearestRows) {
  for (const ClusterSizes& sizes : kClusterSizes) {
    for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
      for (const Path path : {Path::kReference, Path::kFused}) {
        SCOPED_TRACE(::testing::Message()
                     << sizes << " " << at::toString(dtype) << " path " << static_cast<int>(path));
        const ClusterProblem problem = cluster_problem(sizes, dtype);
        ASSERT_EQ(choose_path(problem, path), path);
        expect_nearest(problem, cluster_rows(problem, path));
      }
    }
  }
}

// Rows that are equal have equal scores on a path: the first ones are chosen, and of equal
// centroids the first one.
TEST(Clusters, TheFirstOfEqualScoresIsChosen) {
  for (const Path path : {Path::kReference, Path::kFused}) {
    expect_first_of_equal(cluster_rows(repeated_rows(), path));
  }
}

TEST(Clusters, ZerosAndNaN) {
  for (const Path path : {Path::kReference, Path::kFused}) {
    ClusterProblem problem = cluster_problem({1, 1, 70, 8, 3, 4, false, false}, at::kFloat);
    problem.x_BHLD = problem.x_BHLD.detach().clone();
    problem.x_BHLD[0][0][66].fill_(0);
    problem.x_BHLD[0][0][68][2].fill_(NAN);
    problem.x_BHLD.set_requires_grad(true);
    const ClusteredRows rows = cluster_rows(problem, path);
    EXPECT_EQ(rows.unit_BHLD[0][0][66].abs().max().item<float>(), 0);
    EXPECT_TRUE(rows.unit_BHLD[0][0][68].isnan().all().item<bool>());
    EXPECT_TRUE(rows.distance_BH.isnan().all().item<bool>());
    EXPECT_EQ(rows.cluster_BHL[0][0][68].item<int>(), 0);
    const auto nearest = segments_of(rows.nearest_BHP, rows.nearest_ends_BHG);
    for (const auto& found : nearest[0]) {
      EXPECT_EQ(std::count(found.begin(), found.end(), 68), 1);
    }
    const auto d = gradients(rows.unit_BHLD.narrow(2, 60, 8), {problem.x_BHLD});
    EXPECT_EQ(d[0][0][0][66].abs().max().item<float>(), 0);
    EXPECT_TRUE(d[0].narrow(2, 0, 68).isfinite().all().item<bool>());
  }
}

// Outputs and gradients of the kernels within twice the reference's error of the same dtype.
TEST(Clusters, KernelsAreAsExactAsTheReference) {
  for (const ClusterSizes& sizes : kClusterSizes) {
    for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
      SCOPED_TRACE(::testing::Message() << sizes << " " << at::toString(dtype));
      const ClusterProblem problem = cluster_problem(sizes, dtype);
      EXPECT_TRUE(at::equal(cluster_rows(problem, Path::kFused).cluster_BHL,
                            cluster_rows(problem, Path::kReference).cluster_BHL));
      const auto fused = cluster_results(problem, Path::kFused);
      if (dtype != at::kDouble) {
        expect_as_exact_as_the_reference(problem, fused);
        continue;
      }
      // Nothing is more exact: a sum of L terms in another order.
      const auto exact = cluster_results(problem, Path::kReference);
      for (std::size_t i = 0; i < exact.size(); ++i) {
        const double size = std::max(1.0, exact[i].abs().max().item<double>());
        EXPECT_LE(max_difference(fused[i], exact[i]), 0x1p-52 * static_cast<double>(sizes.L) * size)
            << "result " << i;
      }
    }
  }
}

TEST(Clusters, SumsAreThoseOfTheirRows) {
  for (const Path path : {Path::kReference, Path::kFused}) {
    const ClusterProblem problem = cluster_problem({2, 2, 70, 6, 3, 0, false, true}, at::kDouble);
    const ClusteredRows rows = cluster_rows(problem, path);
    const at::Tensor sums = cluster_sums(problem, rows, path);
    at::Tensor expected = at::zeros({2, 3, 7}, at::kDouble);
    for (int b = 0; b < 2; ++b) {
      for (int h = 0; h < 2; ++h) {
        for (int row = 0; row < 70; ++row) {
          const int cluster = rows.cluster_BHL[b][h][row].item<int>();
          if (cluster < 0) continue;
          const at::Tensor x = problem.x_BHLD.detach()[b][h][row];
          expected[h][cluster].narrow(0, 0, 6) += x / x.norm();
          expected[h][cluster][6] += 1;
        }
      }
    }
    EXPECT_LE(max_difference(sums, expected), 1e-12);
  }
}

TEST(Clusters, TheNumberOfThreadsDoesNotMatter) {
  const ClusterSizes sizes{3, 2, 300, 64, 20, 30, true, true};
  const auto results = [&](int threads) {
    at::set_num_threads(threads);
    const ClusterProblem problem = cluster_problem(sizes, at::kFloat);
    const ClusteredRows rows = cluster_rows(problem, Path::kFused);
    return std::vector<at::Tensor>{rows.unit_BHLD,
                                   rows.distance_BH,
                                   rows.cluster_BHL,
                                   rows.nearest_BHP,
                                   cluster_sums(problem, rows, Path::kFused),
                                   gradients(rows.unit_BHLD, {problem.x_BHLD})[0]};
  };
  const int threads = at::get_num_threads();
  const auto one = results(1), many = results(3);
  at::set_num_threads(threads);
  for (std::size_t i = 0; i < one.size(); ++i) EXPECT_TRUE(at::equal(one[i], many[i])) << i;
}

// Documents may be counted for more samples than there are here.
TEST(Clusters, MoreDocumentsAddEmptySegments) {
  for (const ClusterSizes& sizes : kClusterSizes) {
    SCOPED_TRACE(::testing::Message() << sizes);
    const ClusterProblem exact = cluster_problem(sizes, at::kFloat);
    ClusterProblem more = exact;
    more.documents.count += 2;
    for (const Path path : {Path::kReference, Path::kFused}) {
      const auto lists_of = [&](const ClusterProblem& problem) {
        const ClusteredRows rows = cluster_rows(problem, path);
        const RowLists buckets = causal_buckets(problem, rows, rows, 3).keys;
        return std::vector{segments_of(rows.nearest_BHP, rows.nearest_ends_BHG),
                           segments_of(buckets.rows_BHP, buckets.ends_BHG)};
      };
      auto expected = lists_of(exact);
      const auto found = lists_of(more);
      for (std::size_t i = 0; i < found.size(); ++i) {
        for (std::size_t head = 0; head < found[i].size(); ++head) {
          EXPECT_GT(found[i][head].size(), expected[i][head].size());
          expected[i][head].resize(found[i][head].size());
        }
      }
      EXPECT_EQ(found, expected);
    }
  }
}

// Lists against the definition: a bucket is a cluster in a document, and has its rows in order.
TEST(Clusters, ListsOfBuckets) {
  constexpr std::int64_t kWindow = 3;
  for (const ClusterSizes& sizes : kClusterSizes) {
    SCOPED_TRACE(::testing::Message() << sizes);
    const ClusterProblem q_problem = cluster_problem(sizes, at::kFloat),
                         k_problem = cluster_problem(sizes, at::kFloat, 6);
    const ClusteredRows q = cluster_rows(q_problem, Path::kFused),
                        k = cluster_rows(k_problem, Path::kFused);
    for (const bool shared : {false, true}) {
      const ClusteredRows& keys = shared ? q : k;
      const GatheredRows lists = causal_buckets(q_problem, q, keys, kWindow);
      const std::int64_t B = q.cluster_BHL.size(0), H = q.cluster_BHL.size(1),
                         L = q.cluster_BHL.size(2), K = q_problem.centroids_HKD.size(1),
                         G = q_problem.documents.count * K;
      const at::Tensor document_BL = q_problem.documents.number_BL.expand({B, L});
      const auto bucket_of = [&](const ClusteredRows& rows, std::int64_t b, std::int64_t h,
                                 std::int64_t l) {
        const auto cluster = rows.cluster_BHL[b][h][l].item<std::int64_t>();
        return cluster < 0 ? -1 : document_BL[b][l].item<std::int64_t>() * K + cluster;
      };
      std::vector<std::vector<std::vector<int>>> q_segments, k_segments;
      for (std::int64_t b = 0; b < B; ++b) {
        for (std::int64_t h = 0; h < H; ++h) {
          auto& of_q = q_segments.emplace_back(G);
          auto& of_k = k_segments.emplace_back(G);
          for (std::int64_t l = 0; l < L; ++l) {
            const std::int64_t q_bucket = bucket_of(q, b, h, l),
                               k_bucket = bucket_of(keys, b, h, l);
            if (k_bucket >= 0) {
              auto& rows = of_k[static_cast<std::size_t>(k_bucket)];
              EXPECT_EQ(lists.band.positions_k_BHS[b][h][l].item<int>(), rows.size());
              rows.push_back(static_cast<int>(l));
            }
            if (q_bucket < 0) continue;
            const auto last = static_cast<int>(of_k[static_cast<std::size_t>(q_bucket)].size()) - 1;
            EXPECT_EQ(lists.band.positions_q_BHL[b][h][l].item<int>(),
                      shared ? std::max(last, 1) : last);
            of_q[static_cast<std::size_t>(q_bucket)].push_back(static_cast<int>(l));
          }
        }
      }
      EXPECT_EQ(segments_of(lists.queries.rows_BHP, lists.queries.ends_BHG), q_segments);
      EXPECT_EQ(segments_of(lists.keys.rows_BHP, lists.keys.ends_BHG), k_segments);
      EXPECT_EQ(lists.band.least, shared ? 1 : 0);
      EXPECT_EQ(lists.band.most, kWindow - 1);
      for (const RowLists& each : {lists.queries, lists.keys}) {
        const RowLists inverted = make_row_lists(each.rows_BHP, each.ends_BHG, L);
        EXPECT_TRUE(at::equal(each.order_BHP, inverted.order_BHP));
        EXPECT_TRUE(at::equal(each.starts_BHR, inverted.starts_BHR));
        EXPECT_TRUE(each.once);
        EXPECT_EQ(each.whole, at::all(inverted.starts_BHR.select(2, L) == L).item<bool>());
      }
    }
  }
}

}  // namespace
}  // namespace birkhoff::test
