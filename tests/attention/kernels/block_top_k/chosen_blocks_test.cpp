// Block attention to chosen blocks, which the CPU kernel reads where they lie, against attention to
// copies of them. The random problems of fused_block_attention_test.cpp have them, too. Legend: B
// batch, H heads, G query heads of a key head, N blocks, b tokens of a block, D head dim.
#include <ATen/ATen.h>
#include <fmt/core.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "attention/kernels/block_attention/block_attention.h"
#include "attention/kernels/block_mix/listed_mix.h"
#include "tests/attention/mechanisms/mechanism_cases.h"

namespace birkhoff::test {
namespace {

// Each block of queries sees one chosen block, and then the past of its own.
struct ChosenProblem {
  at::Tensor q_BHNbD, k_BHNbD, v_BHNbD, weights_BHN, chosen_BHN;

  ChosenProblem(std::int64_t G, std::int64_t N, std::int64_t b, at::ScalarType dtype) {
    constexpr std::int64_t B = 2, H = 2, D = 20;
    const auto leaf = [&](const at::Tensor& x) { return x.to(dtype).requires_grad_(true); };
    q_BHNbD = leaf(random_tensor({B, N, b, H * G, D}, at::kDouble, 1).permute({0, 3, 1, 2, 4}));
    k_BHNbD = leaf(random_tensor({B, N, b, H, D}, at::kDouble, 2).permute({0, 3, 1, 2, 4}));
    v_BHNbD = leaf(random_tensor({B, H, N, b, D}, at::kDouble, 3));
    weights_BHN = leaf(random_tensor({B, H, N}, at::kDouble, 4));
    // Blocks 0 and 1 are chosen by half of the destinations each, also by themselves; the others by
    // none.
    chosen_BHN = at::arange(N).remainder(2).expand({B, H, N}).contiguous();
  }

  std::vector<at::Tensor> leaves() const { return {q_BHNbD, k_BHNbD, v_BHNbD, weights_BHN}; }

  BlockAttention attention(const KeyBlocks& sorted, const at::Tensor& own_k_BHNbD,
                           const at::Tensor& own_v_BHNbD) const {
    return {.q_BHNbD = q_BHNbD,
            .keys = {sorted,
                     {.k_BHNbD = own_k_BHNbD,
                      .v_BHNbD = own_v_BHNbD,
                      .window = {.causal = true},
                      .mask_BHNbb = {at::Tensor()}}},
            .noise = {}};
  }
  at::Tensor in_place() const {
    return attend_in_blocks(attention({.k_BHNbD = k_BHNbD,
                                       .v_BHNbD = v_BHNbD,
                                       .mask_BHNbb = {at::Tensor()},
                                       .chosen_BHN = chosen_BHN,
                                       .weights_BHN = weights_BHN},
                                      k_BHNbD, v_BHNbD),
                            Path::kFused);
  }
  at::Tensor of_copies() const {
    const BlockMixes mixes =
        mix_listed_blocks(weights_BHN.unsqueeze(3), chosen_BHN.unsqueeze(3), {k_BHNbD, v_BHNbD});
    return attend_in_blocks(attention({.k_BHNbD = mixes.y_BHNbD[0],
                                       .v_BHNbD = mixes.y_BHNbD[1],
                                       .mask_BHNbb = {at::Tensor()}},
                                      mixes.x_BHNbD[0], mixes.x_BHNbD[1]),
                            Path::kFused);
  }
};

TEST(ChosenBlocks, AreTheirCopiesToTheBit) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    for (const std::int64_t G : {1, 2}) {
      for (const std::int64_t b : {3, 64, 100}) {
        const ChosenProblem problem(G, 5, b, dtype);
        const at::Tensor made = problem.in_place(), expected = problem.of_copies();
        EXPECT_TRUE(at::equal(made, expected)) << G << " " << b << dtype;
        const auto d_made = gradients(made, problem.leaves()),
                   d_expected = gradients(expected, problem.leaves());
        const double eps = dtype == at::kFloat ? 0x1p-23 : 0x1p-52;
        EXPECT_TRUE(at::equal(d_made[0], d_expected[0])) << G << " " << b << dtype;
        for (std::size_t i = 1; i < d_made.size(); ++i) {
          EXPECT_LE(max_difference(d_made[i], d_expected[i]),
                    32 * eps * std::max(1.0, d_expected[i].abs().max().item<double>()))
              << fmt::format("G {} b {} {} leaf {}", G, b, c10::toString(dtype), i);
        }
      }
    }
  }
}

TEST(ChosenBlocks, GradientsAreFiniteDifferences) {
  const ChosenProblem problem(2, 3, 4, at::kDouble);
  const auto d = gradients(problem.in_place(), problem.leaves());
  const at::Tensor d_out = random_tensor(problem.q_BHNbD.sizes(), at::kDouble, 7);
  const at::NoGradGuard no_grad;
  constexpr double kStep = 1e-5;
  for (std::size_t i = 0; i < d.size(); ++i) {
    const at::Tensor leaf = problem.leaves()[i],
                     direction = random_tensor(leaf.sizes(), at::kDouble, 30 + i);
    const auto loss_at = [&](double step) {
      leaf.add_(direction, step);
      const double loss = (problem.in_place() * d_out).sum().item<double>();
      leaf.sub_(direction, step);
      return loss;
    };
    const double slope = (loss_at(kStep) - loss_at(-kStep)) / (2 * kStep),
                 expected = (d[i] * direction).sum().item<double>();
    EXPECT_NEAR(slope, expected, 1e-7 * std::max(1.0, std::abs(expected))) << "leaf " << i;
  }
}

// A block with weight 0 is not read: its NaN stays with the queries of its own destination, and NaN
// of queries stays away from it. Its weight has no gradient.
TEST(ChosenBlocks, WeightsOf0HideNaN) {
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    ChosenProblem problem(1, 6, 8, dtype);
    {
      const at::NoGradGuard no_grad;
      problem.weights_BHN.select(2, 2).fill_(kNaN);
      problem.k_BHNbD.select(2, 3).fill_(kNaN);
      problem.q_BHNbD.select(2, 5).fill_(kNaN);
      for (const std::int64_t n : {4, 5}) {
        problem.weights_BHN.select(2, n).fill_(0);
        problem.chosen_BHN.select(2, n).fill_(n - 1);
      }
    }
    const at::Tensor out = problem.in_place();
    const auto d = gradients(out, problem.leaves());
    const auto blocks = [](const at::Tensor& x) {  // in which blocks there is NaN
      return x.isnan().movedim(2, 0).flatten(1).any(1);
    };
    const auto expect = [&](const at::Tensor& x, const std::vector<int>& expected) {
      EXPECT_TRUE(at::equal(blocks(x), at::tensor(expected).to(at::kBool))) << blocks(x);
    };
    // Block 2 sees block 0 times NaN, and block 3 sees block 1 and its own keys.
    expect(out, {0, 0, 1, 1, 0, 1});
    expect(d[0], {0, 0, 1, 1, 0, 1});
    expect(d[1], {1, 1, 1, 1, 0, 1});
    expect(d[3].unsqueeze(3), {0, 0, 1, 1, 0, 0});
    EXPECT_EQ(d[3].narrow(2, 4, 2).abs().max().item<double>(), 0);
  }
}

}  // namespace
}  // namespace birkhoff::test
