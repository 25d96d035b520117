// Tests fused operations against LibTorch's autograd of the unfused ones. The fused operations
// tested here are the references for the kernels (kernels_gpu_test.cpp).
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <cmath>
#include <optional>
#include <utility>

#include "models/losses/fused_cross_entropy.h"
#include "models/losses/linear_cross_entropy.h"
#include "models/losses/loss_sums.h"
#include "models/transformer/residual_norm.h"
#include "tests/kernel_error.h"

namespace birkhoff {
namespace {

double difference(const at::Tensor& a, const at::Tensor& b) {
  return (a - b).abs().max().item<double>();
}

TEST(FusedCrossEntropy, EqualsTheObjectiveAndItsGradient) {
  const std::int64_t rows = 12, vocabulary = 7;
  const at::Tensor logits_BTV = test_values({3, 4, vocabulary}, 2) * 3;
  const at::Tensor targets_BT =
      at::arange(rows, at::kLong).mul(5).remainder(vocabulary).view({3, 4});
  const at::Tensor mask_BT = at::arange(rows).remainder(4).ne(1).to(at::kByte).view({3, 4});
  for (const double smoothing : {0.0, 0.1, 0.75}) {
    at::Tensor fused_NV = logits_BTV.detach().clone().view({rows, vocabulary});
    at::Tensor leaf_BTV = logits_BTV.clone().requires_grad_(true);
    const LossSums sums = cross_entropy_sums(leaf_BTV, targets_BT, mask_BT, smoothing);
    sums.loss.backward();

    const auto [nats_N, losses_N] =
        fused_cross_entropy_(fused_NV, targets_BT.view({-1}), mask_BT.view({-1}), smoothing);
    EXPECT_NEAR(losses_N.sum().item<double>(), sums.loss.item<double>(), 1e-12);
    EXPECT_NEAR(nats_N.sum().item<double>(), sums.nats.item<double>(), 1e-12);
    EXPECT_LT(difference(fused_NV, leaf_BTV.grad().view({rows, vocabulary})), 1e-14);
    EXPECT_EQ(losses_N[1].item<double>(), 0);  // masked
    EXPECT_EQ(nats_N[1].item<double>(), 0);
    EXPECT_EQ(fused_NV[1].abs().max().item<double>(), 0);
  }
}

// Rows that do not count may have any target.
TEST(FusedCrossEntropy, NeverReadsMaskedTargets) {
  const at::Tensor logits_NV = at::zeros({2, 4}, at::kDouble);
  const at::Tensor losses_N = fused_cross_entropy_(logits_NV, at::tensor({3, -77}, at::kLong),
                                                   at::tensor({1, 0}, at::kByte))
                                  .nats_N;
  EXPECT_NEAR(losses_N[0].item<double>(), std::log(4.0), 1e-15);
  EXPECT_EQ(losses_N[1].item<double>(), 0);
}

TEST(LinearCrossEntropy, EqualsTheLossOfTheProductAndItsGradients) {
  const std::int64_t vocabulary = 7;
  for (const std::int64_t rows : {12, 1, 0}) {
    const at::Tensor targets_N = at::arange(rows, at::kLong).mul(5).remainder(vocabulary),
                     mask_N = at::arange(rows).remainder(4).ne(1).to(at::kByte);
    for (const double smoothing : {0.0, 0.3}) {
      SCOPED_TRACE(testing::Message() << rows << " rows, smoothing " << smoothing);
      const auto leaf = [&](at::IntArrayRef shape, int seed) {
        return test_values(shape, seed).mul(2).requires_grad_(true);
      };
      const at::Tensor x_NE = leaf({rows, 3}, 1), weight_VE = leaf({vocabulary, 3}, 2),
                       x = leaf({rows, 3}, 1), weight = leaf({vocabulary, 3}, 2);
      const at::Tensor logits_NV = at::matmul(x, weight.t());
      const LossSums expected = cross_entropy_sums(logits_NV.unsqueeze(0), targets_N.unsqueeze(0),
                                                   mask_N.unsqueeze(0), smoothing);
      (expected.loss * 3).backward();
      const LinearCrossEntropy fused =
          linear_cross_entropy(x_NE, weight_VE, targets_N, mask_N, smoothing, true);
      (fused.sums.loss * 3).backward();
      EXPECT_NEAR(fused.sums.loss.item<double>(), expected.loss.item<double>(), 1e-12);
      EXPECT_NEAR(fused.sums.nats.item<double>(), expected.nats.item<double>(), 1e-12);
      EXPECT_EQ(fused.sums.count.item<double>(), expected.count.item<double>());
      EXPECT_TRUE(at::equal(fused.correct_N, logits_NV.argmax(-1).eq(targets_N)));
      ASSERT_TRUE(weight_VE.grad().defined());
      EXPECT_LT(difference(weight_VE.grad(), weight.grad()), 1e-12);
      if (rows > 0) {
        EXPECT_LT(difference(x_NE.grad(), x.grad()), 1e-12);
      }

      const at::NoGradGuard no_gradients;
      const LinearCrossEntropy evaluated =
          linear_cross_entropy(x_NE, weight_VE, targets_N, mask_N, smoothing, true);
      EXPECT_NEAR(evaluated.sums.loss.item<double>(), expected.loss.item<double>(), 1e-12);
      EXPECT_NEAR(evaluated.sums.nats.item<double>(), expected.nats.item<double>(), 1e-12);
      if (rows > 0) {
        EXPECT_LT(difference(evaluated.sums.nats_N, expected.nats_N), 1e-12);
        EXPECT_LT(difference(fused.sums.nats_N, expected.nats_N), 1e-12);
      }
      EXPECT_EQ(evaluated.sums.count.item<double>(), expected.count.item<double>());
      EXPECT_TRUE(at::equal(evaluated.correct_N, fused.correct_N));
    }
  }
}

TEST(ResidualNorm, EqualsLayerNormOfTheSumAndItsGradients) {
  constexpr double kEpsilon = 1e-5;
  for (const ResidualNormTerms terms :
       {ResidualNormTerms{true, true}, {true, false}, {false, true}}) {
    at::Tensor x_NC = test_values({5, 24}, 1).requires_grad_(true);
    at::Tensor y_NC = test_values({5, 24}, 2).requires_grad_(true);
    at::Tensor weight_C = (test_values({24}, 3) + 1).requires_grad_(true);
    at::Tensor bias_C;
    if (terms.bias) bias_C = test_values({24}, 4).requires_grad_(true);
    const at::Tensor d_sum_NC = test_values({5, 24}, 5), d_normed_NC = test_values({5, 24}, 6);
    const at::Tensor sum_NC = terms.branch ? x_NC + y_NC : x_NC;
    const at::Tensor normed_NC = at::layer_norm(
        sum_NC, {24}, weight_C, terms.bias ? std::optional(bias_C) : std::nullopt, kEpsilon);
    ((sum_NC * d_sum_NC).sum() + (normed_NC * d_normed_NC).sum()).backward();

    const ResidualNorm forward =
        residual_norm(x_NC.detach(), terms.branch ? y_NC.detach() : at::Tensor(), weight_C.detach(),
                      terms.bias ? bias_C.detach() : at::Tensor(), kEpsilon, at::kDouble);
    EXPECT_LT(difference(forward.sum_NC, sum_NC), 1e-15);
    EXPECT_LT(difference(forward.normed_NC, normed_NC), 1e-12);
    const ResidualNormGradients gradients =
        residual_norm_backward(d_sum_NC, d_normed_NC, forward, weight_C.detach(), terms);
    EXPECT_LT(difference(gradients.d_x_NC, x_NC.grad()), 1e-12);
    EXPECT_EQ(gradients.d_y_NC.defined(), terms.branch);
    if (terms.branch) {
      EXPECT_LT(difference(gradients.d_y_NC, y_NC.grad()), 1e-12);
    }
    EXPECT_LT(difference(gradients.d_weight_C, weight_C.grad()), 1e-12);
    EXPECT_EQ(gradients.d_bias_C.defined(), terms.bias);
    if (terms.bias) {
      EXPECT_LT(difference(gradients.d_bias_C, bias_C.grad()), 1e-12);
    }
  }
}

// As an autograd operation, also with a branch in bf16: inputs and outputs of the branch are
// rounded once, the stream is not.
TEST(ResidualNorm, IsDifferentiatedAsAWhole) {
  const auto fresh = [](const at::Tensor& tensor, at::ScalarType dtype) {
    return tensor.to(dtype).detach().clone().requires_grad_(true);
  };
  constexpr std::pair<at::ScalarType, ResidualNormTerms> kCases[] = {
      {at::kFloat, {true, true}},
      {at::kFloat, {true, false}},
      {at::kFloat, {false, true}},
      {at::kBFloat16, {true, true}},
      {at::kBFloat16, {false, true}}};
  for (const auto& [branch, terms] : kCases) {
    const at::Tensor x = fresh(test_values({2, 3, 16}, 1), at::kFloat);
    const at::Tensor y = terms.branch ? fresh(test_values({16, 3, 2}, 2), branch) : at::Tensor();
    const at::Tensor weight = fresh(test_values({16}, 3) + 1, at::kFloat);
    const at::Tensor bias = terms.bias ? fresh(test_values({16}, 4), at::kFloat) : at::Tensor();
    const at::Tensor d_sum = test_values({2, 3, 16}, 5).to(at::kFloat);
    const at::Tensor d_normed = test_values({2, 3, 16}, 6).to(branch);
    const auto [sum, normed] =
        add_and_norm(x, terms.branch ? y.transpose(0, 2) : y, weight, bias, 1e-5, branch);
    EXPECT_EQ(sum.scalar_type(), at::kFloat);
    EXPECT_EQ(sum.is_alias_of(x), !terms.branch);
    EXPECT_EQ(normed.scalar_type(), branch);
    ((sum * d_sum).sum() + (normed * d_normed).to(at::kFloat).sum()).backward();

    const at::Tensor x_2 = fresh(x, at::kDouble), weight_2 = fresh(weight, at::kDouble);
    const at::Tensor y_2 = terms.branch ? fresh(y, at::kDouble) : y;
    const auto bias_2 = terms.bias ? std::optional(fresh(bias, at::kDouble)) : std::nullopt;
    const at::Tensor sum_2 = terms.branch ? x_2 + y_2.transpose(0, 2) : x_2;
    const at::Tensor normed_2 = at::layer_norm(sum_2, {16}, weight_2, bias_2, 1e-5);
    ((sum_2 * d_sum).sum() + (normed_2 * d_normed).sum()).backward();
    const double rounding = branch == at::kFloat ? 1e-5 : 0x1p-7;
    EXPECT_LT(difference(sum, sum_2), 1e-6);
    EXPECT_LT(difference(normed, normed_2), 2 * rounding);
    EXPECT_LT(difference(x.grad(), x_2.grad()), 1e-5);
    if (terms.branch) {
      EXPECT_LT(difference(y.grad(), y_2.grad()), 4 * rounding);
    }
    EXPECT_LT(difference(weight.grad(), weight_2.grad()), 1e-5);
    if (terms.bias) {
      EXPECT_LT(difference(bias.grad(), bias_2->grad()), 1e-5);
    }
  }
}

}  // namespace
}  // namespace birkhoff
