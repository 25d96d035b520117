// Clusters of unit vectors: the CPU kernels against the reference, and both against loops.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "attention/kernels/clusters/cluster_lists.h"
#include "attention/kernels/clusters/clusters.h"
#include "tests/attention/mechanism_cases.h"

namespace birkhoff::test {
namespace {

at::Tensor unit_centroids(std::int64_t H, std::int64_t K, std::int64_t D, at::ScalarType dtype) {
  const at::Tensor x = random_tensor({H, K, D}, dtype, 77);
  return x / at::linalg_vector_norm(x, 2, at::IntArrayRef({2}), true);
}

struct Shape {
  std::int64_t B, H, L, D, K, window;
  bool documents, padding;
};
std::ostream& operator<<(std::ostream& out, const Shape& s) {
  return out << "B " << s.B << " H " << s.H << " L " << s.L << " D " << s.D << " K " << s.K
             << " window " << s.window << " documents " << s.documents << " padding " << s.padding;
}

const Shape kShapes[] = {{2, 2, 14, 3, 4, 5, false, false},   {2, 3, 130, 16, 9, 16, true, true},
                         {1, 1, 1, 1, 1, 1, false, false},    {2, 1, 200, 64, 17, 40, false, true},
                         {1, 2, 65, 33, 3, 100, true, false}, {1, 1, 64, 256, 64, 1, false, false}};

ClusterProblem problem_of(const Shape& s, at::ScalarType dtype, std::uint64_t seed = 5) {
  const at::ScalarType sums = dtype == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor x = random_tensor({s.B, s.L, s.H, s.D}, sums, seed).transpose(1, 2).to(dtype);
  at::Tensor segments_BL, lengths_B;
  if (s.documents) {
    const at::Tensor row_L = at::arange(s.L);
    segments_BL = (row_L.unsqueeze(0) * 3 / s.L + (row_L.unsqueeze(0) == s.L - 1).to(at::kLong) +
                   at::arange(s.B).unsqueeze(1))
                      .to(at::kInt);
  }
  if (s.padding) lengths_B = s.L - at::arange(s.B) * (s.L / 2);
  return {.x_BHLD = x.detach().set_requires_grad(true),
          .centroids_HKD = unit_centroids(s.H, s.K, s.D, sums),
          .documents = Documents(segments_BL, lengths_B, x),
          .length = 2.5,
          .window = s.window};
}

// The used places of lists, as vectors: [head][segment].
std::vector<std::vector<std::vector<int>>> segments_of(const at::Tensor& rows_BHP,
                                                       const at::Tensor& ends_BHG) {
  std::vector<std::vector<std::vector<int>>> all;
  for (std::int64_t head = 0; head < rows_BHP.size(0) * rows_BHP.size(1); ++head) {
    const auto* rows = rows_BHP.const_data_ptr<std::int32_t>() + head * rows_BHP.size(2);
    const auto* ends = ends_BHG.const_data_ptr<std::int32_t>() + head * ends_BHG.size(2);
    auto& of_head = all.emplace_back();
    for (std::int64_t g = 0; g < ends_BHG.size(2); ++g) {
      of_head.emplace_back(rows + (g == 0 ? 0 : ends[g - 1]), rows + ends[g]);
    }
  }
  return all;
}

// Clusters and nearest rows by the definition, from scores in fp64 of the same numbers.
TEST(Clusters, AreNearestCentroidsAndNearestRows) {
  for (const Shape& s : kShapes) {
    for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
      for (const Path path : {Path::kReference, Path::kFused}) {
        SCOPED_TRACE(::testing::Message()
                     << s << " " << at::toString(dtype) << " path " << static_cast<int>(path));
        const ClusterProblem problem = problem_of(s, dtype);
        ASSERT_EQ(choose_path(problem, path), path);
        const ClusteredRows rows = cluster_rows(problem, path);
        const auto nearest = segments_of(rows.nearest_BHP, rows.nearest_ends_BHG);
        const at::Tensor x = problem.x_BHLD.detach().to(at::kDouble);
        const at::Tensor scores =
            at::matmul(x / at::linalg_vector_norm(x, 2, at::IntArrayRef({3}), true),
                       problem.centroids_HKD.to(at::kDouble).transpose(1, 2));
        for (std::int64_t b = 0; b < s.B; ++b) {
          const at::Tensor document =
              problem.documents.number_BL[problem.documents.number_BL.size(0) == 1 ? 0 : b];
          for (std::int64_t h = 0; h < s.H; ++h) {
            const at::Tensor score = scores[b][h].contiguous();
            const auto score_of = [&](std::int64_t row, std::int64_t c) {
              return score.const_data_ptr<double>()[row * s.K + c];
            };
            for (std::int64_t row = 0; row < s.L; ++row) {
              const int cluster = rows.cluster_BHL[b][h][row].item<int>();
              if (document[row].item<int>() < 0) {
                EXPECT_EQ(cluster, -1);
                continue;
              }
              ASSERT_GE(cluster, 0);
              EXPECT_GE(score_of(row, cluster), score[row].max().item<double>() - 1e-6);
            }
            for (std::int64_t g = 0; g < problem.documents.count * s.K; ++g) {
              std::vector<std::int64_t> expected;
              for (std::int64_t row = 0; row < s.L; ++row) {
                if (document[row].item<int>() == g / s.K) expected.push_back(row);
              }
              std::stable_sort(expected.begin(), expected.end(), [&](auto i, auto j) {
                return score_of(i, g % s.K) > score_of(j, g % s.K);
              });
              if (static_cast<std::int64_t>(expected.size()) > s.window) {
                expected.resize(static_cast<std::size_t>(s.window));
              }
              std::sort(expected.begin(), expected.end());
              const auto& found =
                  nearest[static_cast<std::size_t>(b * s.H + h)][static_cast<std::size_t>(g)];
              EXPECT_TRUE(std::equal(found.begin(), found.end(), expected.begin(), expected.end()))
                  << "segment " << g;
            }
          }
        }
      }
    }
  }
}

// Rows that are equal have equal scores on a path: the first ones are chosen, and of equal
// centroids the first one.
TEST(Clusters, TheFirstOfEqualScoresIsChosen) {
  for (const Path path : {Path::kReference, Path::kFused}) {
    ClusterProblem problem = problem_of({1, 1, 150, 16, 4, 20, false, false}, at::kFloat);
    problem.x_BHLD = problem.x_BHLD.detach().narrow(2, 0, 3).repeat({1, 1, 50, 1});
    problem.centroids_HKD = problem.centroids_HKD.narrow(1, 0, 1).repeat({1, 4, 1});
    const ClusteredRows rows = cluster_rows(problem, path);
    EXPECT_EQ(rows.cluster_BHL.abs().max().item<int>(), 0);
    const auto nearest = segments_of(rows.nearest_BHP, rows.nearest_ends_BHG);
    for (const auto& found : nearest[0]) {
      ASSERT_EQ(found.size(), 20u);
      EXPECT_LT(found[0], 3);
      for (std::size_t i = 0; i < found.size(); ++i) {
        EXPECT_EQ(found[i], found[0] + 3 * static_cast<int>(i));
      }
    }
  }
}

TEST(Clusters, ZerosAndNaN) {
  for (const Path path : {Path::kReference, Path::kFused}) {
    ClusterProblem problem = problem_of({1, 1, 70, 8, 3, 4, false, false}, at::kFloat);
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
  for (const Shape& s : kShapes) {
    for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
      SCOPED_TRACE(::testing::Message() << s << " " << at::toString(dtype));
      const auto results = [&](at::ScalarType of, Path path) {
        ClusterProblem problem = problem_of(s, dtype);
        const ClusteredRows chosen = cluster_rows(problem, Path::kReference);
        if (of != dtype) {
          problem.x_BHLD = problem.x_BHLD.detach().to(of).set_requires_grad(true);
          problem.centroids_HKD = problem.centroids_HKD.to(of);
        }
        const ClusteredRows rows = cluster_rows(problem, path);
        EXPECT_EQ(rows.cluster_BHL.ne(chosen.cluster_BHL).sum().item<std::int64_t>(), 0);
        const at::Tensor weights = random_tensor(rows.unit_BHLD.sizes(), at::kDouble, 8);
        const at::Tensor loss = (rows.unit_BHLD.to(at::kDouble) * weights).sum() +
                                (rows.distance_BH.to(at::kDouble) *
                                 random_tensor(rows.distance_BH.sizes(), at::kDouble, 9))
                                    .sum();
        std::vector<at::Tensor> all{rows.unit_BHLD, rows.distance_BH,
                                    cluster_sums(problem, rows, path)};
        all.push_back(gradients(loss, {problem.x_BHLD})[0]);
        return all;
      };
      const auto exact = results(at::kDouble, Path::kReference),
                 reference = results(dtype, Path::kReference), fused = results(dtype, Path::kFused);
      for (std::size_t i = 0; i < exact.size(); ++i) {
        const at::ScalarType type = fused[i].scalar_type();
        ASSERT_EQ(type, reference[i].scalar_type());
        const double size = std::max(1.0, exact[i].detach().abs().max().item<double>());
        if (dtype == at::kDouble) {  // nothing is more exact: a sum of L terms in another order
          EXPECT_LE(max_difference(fused[i], exact[i]), 0x1p-52 * static_cast<double>(s.L) * size)
              << "result " << i;
          continue;
        }
        const double eps = type == at::kBFloat16 ? 0x1p-8 : 0x1p-23;
        EXPECT_LE(max_difference(fused[i], exact[i]),
                  2 * max_difference(reference[i], exact[i]) + 2 * eps * size)
            << "result " << i;
      }
    }
  }
}

TEST(Clusters, SumsAreThoseOfTheirRows) {
  for (const Path path : {Path::kReference, Path::kFused}) {
    const ClusterProblem problem = problem_of({2, 2, 70, 6, 3, 0, false, true}, at::kDouble);
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
  const Shape shape{3, 2, 300, 64, 20, 30, true, true};
  const auto results = [&](int threads) {
    at::set_num_threads(threads);
    const ClusterProblem problem = problem_of(shape, at::kFloat);
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

// Lists by counting and by sorting are the same.
TEST(Clusters, ListsOfBucketsDoNotDependOnThePath) {
  for (const Shape& s : kShapes) {
    SCOPED_TRACE(::testing::Message() << s);
    const ClusterProblem q_problem = problem_of(s, at::kFloat),
                         k_problem = problem_of(s, at::kFloat, 6);
    const ClusteredRows q = cluster_rows(q_problem, Path::kFused),
                        k = cluster_rows(k_problem, Path::kFused);
    for (const bool shared : {false, true}) {
      const GatheredRows counted = causal_buckets(q_problem, q, shared ? q : k, 3, Path::kFused),
                         sorted = causal_buckets(q_problem, q, shared ? q : k, 3, Path::kReference);
      for (const auto lists : {&GatheredRows::queries, &GatheredRows::keys}) {
        EXPECT_EQ(segments_of((counted.*lists).rows_BHP, (counted.*lists).ends_BHG),
                  segments_of((sorted.*lists).rows_BHP, (sorted.*lists).ends_BHG));
      }
      const at::Tensor exists = q.cluster_BHL >= 0;
      EXPECT_TRUE(at::equal(counted.band.positions_q_BHL.masked_select(exists),
                            sorted.band.positions_q_BHL.masked_select(exists)));
      EXPECT_TRUE(at::equal(counted.band.positions_k_BHS.masked_select(exists),
                            sorted.band.positions_k_BHS.masked_select(exists)));
    }
  }
}

}  // namespace
}  // namespace birkhoff::test
