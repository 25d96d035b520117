// Block mixing of few sources, against the product with all weights in fp64. Legend: B batch, H
// heads, N blocks, U destinations, m sources of a destination, b tokens of a block, D head dim.
#include "attention/kernels/block_mix/listed_mix.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/attention/mechanisms/mechanism_cases.h"

namespace birkhoff::test {
namespace {

struct ListedProblem {
  at::Tensor weights_BHUm, sources_BHUm, k_BHNbD, v_BHNbD;

  ListedProblem(std::int64_t N, std::int64_t U, std::int64_t m, std::int64_t b, std::int64_t D,
                bool shared, at::ScalarType dtype) {
    const auto leaf = [&](const at::Tensor& x) { return x.to(dtype).requires_grad_(true); };
    const std::int64_t B = shared ? 1 : 2, H = shared ? 1 : 3;
    weights_BHUm = leaf(random_tensor({B, H, U, m}, at::kDouble, 1));
    // Different sources of a destination.
    sources_BHUm = at::argsort(random_tensor({B, H, U, N}, at::kDouble, 2), std::int64_t{3}, false)
                       .narrow(3, 0, m);
    k_BHNbD = leaf(random_tensor({2, N, b, 3, D}, at::kDouble, 3).permute({0, 3, 1, 2, 4}));
    v_BHNbD = leaf(random_tensor({2, 3, N, b, D}, at::kDouble, 4));
  }

  // The mixes and a use of x itself, and the gradients of all leaves.
  std::vector<at::Tensor> solve() const {
    const BlockMixes mixes = mix_listed_blocks(weights_BHUm, sources_BHUm, {k_BHNbD, v_BHNbD});
    return with_gradients({mixes.y_BHNbD[0], mixes.y_BHNbD[1], mixes.x_BHNbD[1] * 2});
  }
  std::vector<at::Tensor> solve_by_products() const {
    const std::int64_t U = weights_BHUm.size(2), N = k_BHNbD.size(2);
    const at::Tensor all_BHUN =
        at::zeros({weights_BHUm.size(0), weights_BHUm.size(1), U, N}, weights_BHUm.options())
            .scatter(3, sources_BHUm, weights_BHUm)
            .expand({2, 3, U, N});
    return with_gradients(
        {mix_blocks(all_BHUN, k_BHNbD), mix_blocks(all_BHUN, v_BHNbD), v_BHNbD * 2});
  }
  ListedProblem to(at::ScalarType dtype) const {
    ListedProblem other = *this;
    for (at::Tensor* x : {&other.weights_BHUm, &other.k_BHNbD, &other.v_BHNbD}) {
      *x = x->detach().to(dtype).requires_grad_(true);
    }
    return other;
  }

 private:
  std::vector<at::Tensor> with_gradients(const std::vector<at::Tensor>& results) const {
    at::Tensor sum = at::zeros({}, k_BHNbD.options());
    std::vector<at::Tensor> all;
    for (std::size_t i = 0; i < results.size(); ++i) {
      sum = sum + (results[i] *
                   random_tensor(results[i].sizes(), at::kDouble, 20 + i).to(results[i].dtype()))
                      .sum();
      all.push_back(results[i].detach());
    }
    for (const at::Tensor& d : gradients(sum, {weights_BHUm, k_BHNbD, v_BHNbD})) all.push_back(d);
    return all;
  }
};

TEST(ListedMix, IsTheProductWithAllWeights) {
  for (const auto& [N, U, m, b, D] : {std::tuple(1, 1, 1, 2, 3),
                                      {8, 8, 1, 4, 16},
                                      {9, 9, 3, 2, 33},
                                      {40, 40, 2, 16, 64},
                                      {17, 17, 17, 1, 5},
                                      {24, 2, 24, 4, 16},
                                      {9, 5, 3, 2, 8}}) {
    for (const bool shared : {false, true}) {
      for (const auto& [dtype, unit] :
           {std::pair(at::kDouble, 0x1p-52), {at::kFloat, 0x1p-23}, {at::kBFloat16, 0x1p-7}}) {
        const ListedProblem problem(N, U, m, b, D, shared, dtype);
        const auto expected = problem.to(at::kDouble).solve_by_products(), made = problem.solve();
        // Sums of up to B H N b D products of unit numbers.
        const double tolerance =
            4 * unit * (8 + std::sqrt(static_cast<double>((shared ? 6 : 1) * 2 * N * b * D)));
        for (std::size_t i = 0; i < made.size(); ++i) {
          EXPECT_LE(max_difference(made[i], expected[i]), tolerance)
              << fmt::format("N {} m {} b {} D {} shared {} {} result {}", N, m, b, D, shared,
                             c10::toString(dtype), i);
        }
      }
    }
  }
}

TEST(ListedMix, WeightsOf0HideNaN) {
  ListedProblem problem(8, 8, 2, 4, 16, false, at::kFloat);
  at::NoGradGuard no_grad;
  problem.weights_BHUm.fill_(1).select(3, 1).fill_(0);
  problem.sources_BHUm.select(3, 0).fill_(3);
  problem.sources_BHUm.select(3, 1).fill_(5);
  problem.k_BHNbD.select(2, 5).fill_(std::numeric_limits<float>::quiet_NaN());
  at::AutoGradMode with_gradients(true);
  const auto results = problem.solve();
  for (const at::Tensor& x : results) EXPECT_TRUE(x.isfinite().all().item<bool>());
  EXPECT_EQ(results[3].select(3, 1).abs().max().item<float>(), 0);
}

TEST(ListedMix, SameBitsForAnyNumberOfThreads) {
  const int threads = at::get_num_threads();
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const ListedProblem problem(64, 64, 3, 32, 40, false, dtype);
    at::set_num_threads(1);
    const auto one = problem.solve();
    at::set_num_threads(3);
    const auto three = problem.solve();
    for (std::size_t i = 0; i < one.size(); ++i) EXPECT_TRUE(at::equal(one[i], three[i])) << i;
  }
  at::set_num_threads(threads);
}

}  // namespace
}  // namespace birkhoff::test
