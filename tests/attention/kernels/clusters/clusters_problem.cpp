#include "tests/attention/kernels/clusters/clusters_problem.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>

#include "tests/attention/mechanisms/mechanism_cases.h"

namespace birkhoff::test {
namespace {

at::Tensor unit_centroids(std::int64_t H, std::int64_t K, std::int64_t D, at::ScalarType dtype) {
  const at::Tensor x = random_tensor({H, K, D}, dtype, 77);
  return x / at::linalg_vector_norm(x, 2, at::IntArrayRef({2}), true);
}

// The scores of the rows of a head in fp64, [L, K].
class HeadScores {
 public:
  HeadScores(const at::Tensor& x_LD, const at::Tensor& centroids_KD)
      : scores_(at::matmul(x_LD / at::linalg_vector_norm(x_LD, 2, at::IntArrayRef({1}), true),
                           centroids_KD.t())
                    .contiguous()) {}

  double at(std::int64_t row, std::int64_t c) const {
    return scores_.const_data_ptr<double>()[row * scores_.size(1) + c];
  }
  double best(std::int64_t row) const { return scores_[row].max().item<double>(); }

 private:
  at::Tensor scores_;
};

// The rows of `document` that cluster c must choose.
std::vector<int> nearest_rows(const HeadScores& scores, const at::Tensor& document_L, int document,
                              std::int64_t c, std::int64_t window) {
  std::vector<int> rows;
  for (int row = 0; row < document_L.size(0); ++row) {
    if (document_L[row].item<int>() == document) rows.push_back(row);
  }
  std::stable_sort(rows.begin(), rows.end(),
                   [&](int i, int j) { return scores.at(i, c) > scores.at(j, c); });
  rows.resize(std::min(rows.size(), static_cast<std::size_t>(window)));
  std::sort(rows.begin(), rows.end());
  return rows;
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const ClusterSizes& s) {
  return out << "B " << s.B << " H " << s.H << " L " << s.L << " D " << s.D << " K " << s.K
             << " window " << s.window << " documents " << s.documents << " padding " << s.padding;
}

ClusterProblem cluster_problem(const ClusterSizes& s, at::ScalarType dtype, std::uint64_t seed) {
  const at::ScalarType sums = at::toOpMathType(dtype);
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
          .documents = Documents(segments_BL, lengths_B, x, /*num_documents=*/0),
          .length = 2.5,
          .window = s.window};
}

ClusterProblem repeated_rows() {
  ClusterProblem problem = cluster_problem({1, 1, 150, 16, 40, 20, false, false}, at::kFloat);
  // Unit rows of 1/4 and -1/4, and centroids of few bits: scores are exact in any order of sums.
  problem.x_BHLD = problem.x_BHLD.detach().narrow(2, 0, 3).sign().div(4).repeat({1, 1, 50, 1});
  problem.centroids_HKD =
      problem.centroids_HKD.narrow(1, 0, 1).mul(64).round().div(64).repeat({1, 40, 1});
  return problem;
}

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

void expect_nearest(const ClusterProblem& problem, const ClusteredRows& rows) {
  const at::Tensor x = problem.x_BHLD.detach().to(at::kDouble),
                   centroids = problem.centroids_HKD.to(at::kDouble);
  const std::int64_t H = x.size(1), K = centroids.size(1);
  const auto nearest = segments_of(rows.nearest_BHP, rows.nearest_ends_BHG);
  for (std::int64_t head = 0; head < x.size(0) * H; ++head) {
    const std::int64_t b = head / H, h = head % H;
    const at::Tensor document_L =
        problem.documents.number_BL[problem.documents.number_BL.size(0) == 1 ? 0 : b];
    const HeadScores scores(x[b][h], centroids[h]);
    for (std::int64_t row = 0; row < x.size(2); ++row) {
      const int cluster = rows.cluster_BHL[b][h][row].item<int>();
      if (document_L[row].item<int>() < 0) {
        EXPECT_EQ(cluster, -1);
        continue;
      }
      ASSERT_GE(cluster, 0);
      EXPECT_GE(scores.at(row, cluster), scores.best(row) - 1e-6);
    }
    for (std::int64_t g = 0; g < problem.documents.count * K; ++g) {
      EXPECT_EQ(nearest[static_cast<std::size_t>(head)][static_cast<std::size_t>(g)],
                nearest_rows(scores, document_L, static_cast<int>(g / K), g % K, problem.window))
          << "head " << head << " segment " << g;
    }
  }
}

void expect_first_of_equal(const ClusteredRows& rows) {
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

ClusterWeights cluster_weights(const ClusterProblem& problem) {
  const at::Tensor& x = problem.x_BHLD;
  return {random_tensor(x.sizes(), at::kDouble, 8).to(x.device(), x.scalar_type()),
          random_tensor({x.size(0), x.size(1)}, at::kDouble, 9)
              .to(x.device(), problem.centroids_HKD.scalar_type())};
}

std::vector<at::Tensor> cluster_results(const ClusterProblem& problem, Path path) {
  const ClusteredRows rows = cluster_rows(problem, path);
  const ClusterWeights weights = cluster_weights(problem);
  const auto d_x = torch::autograd::grad({rows.unit_BHLD, rows.distance_BH}, {problem.x_BHLD},
                                         {weights.d_unit_BHLD, weights.d_distance_BH});
  return {rows.unit_BHLD.detach(), rows.distance_BH.detach(), cluster_sums(problem, rows, path),
          d_x[0]};
}

ClusterProblem in_dtype(ClusterProblem problem, at::ScalarType dtype) {
  problem.x_BHLD = problem.x_BHLD.detach().to(dtype).set_requires_grad(true);
  problem.centroids_HKD = problem.centroids_HKD.to(at::toOpMathType(dtype));
  return problem;
}

void expect_as_exact_as_the_reference(const ClusterProblem& problem,
                                      const std::vector<at::Tensor>& results) {
  const auto exact = cluster_results(in_dtype(problem, at::kDouble), Path::kReference),
             reference = cluster_results(problem, Path::kReference);
  for (std::size_t i = 0; i < exact.size(); ++i) {
    const at::ScalarType type = results[i].scalar_type();
    ASSERT_EQ(type, reference[i].scalar_type());
    const double eps = type == at::kBFloat16 ? 0x1p-8 : type == at::kHalf ? 0x1p-11 : 0x1p-23;
    const double size = std::max(1.0, exact[i].abs().max().item<double>());
    EXPECT_LE(max_difference(results[i], exact[i]),
              2 * max_difference(reference[i], exact[i]) + 2 * eps * size)
        << "result " << i;
  }
}

}  // namespace birkhoff::test
