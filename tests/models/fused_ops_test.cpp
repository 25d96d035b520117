// Fused operations against what LibTorch's autograd makes of the unfused ones: the references that
// kernels are measured by (kernels_gpu_test.cpp).
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <optional>

#include "models/fused_cross_entropy.h"
#include "models/objective.h"
#include "models/residual_norm.h"
#include "tests/kernel_error.h"

namespace birkhoff {
namespace {

double difference(const at::Tensor& a, const at::Tensor& b) {
  return (a - b).abs().max().item<double>();
}

TEST(FusedCrossEntropy, EqualsTheObjectiveAndItsGradient) {
  const std::int64_t rows = 12, vocabulary = 7;
  at::Tensor logits_BTV = test_values({3, 4, vocabulary}, 2) * 3;
  const at::Tensor targets_BT =
      at::arange(rows, at::kLong).mul(5).remainder(vocabulary).view({3, 4});
  const at::Tensor mask_BT = at::arange(rows).remainder(4).ne(1).to(at::kByte).view({3, 4});
  at::Tensor fused_NV = logits_BTV.clone().view({rows, vocabulary});
  logits_BTV.requires_grad_(true);
  const ObjectiveSums sums = cross_entropy_sums(logits_BTV, targets_BT, mask_BT);
  sums.loss.backward();

  const at::Tensor losses_N =
      fused_cross_entropy_(fused_NV, targets_BT.view({-1}), mask_BT.view({-1}));
  EXPECT_NEAR(losses_N.sum().item<double>(), sums.loss.item<double>(), 1e-12);
  EXPECT_LT(difference(fused_NV, logits_BTV.grad().view({rows, vocabulary})), 1e-14);
  EXPECT_EQ(losses_N[1].item<double>(), 0);  // masked
  EXPECT_EQ(fused_NV[1].abs().max().item<double>(), 0);
}

// The targets of rows that do not count may be anything.
TEST(FusedCrossEntropy, NeverReadsMaskedTargets) {
  const at::Tensor logits_NV = at::zeros({2, 4}, at::kDouble);
  const at::Tensor losses_N = fused_cross_entropy_(logits_NV, at::tensor({3, -77}, at::kLong),
                                                   at::tensor({1, 0}, at::kByte));
  EXPECT_NEAR(losses_N[0].item<double>(), std::log(4.0), 1e-15);
  EXPECT_EQ(losses_N[1].item<double>(), 0);
}

TEST(ResidualNorm, EqualsLayerNormOfTheSumAndItsGradients) {
  constexpr double kEpsilon = 1e-5;
  for (const bool has_bias : {true, false}) {
    at::Tensor x_NC = test_values({5, 24}, 1).requires_grad_(true);
    at::Tensor y_NC = test_values({5, 24}, 2).requires_grad_(true);
    at::Tensor weight_C = (test_values({24}, 3) + 1).requires_grad_(true);
    at::Tensor bias_C;
    if (has_bias) bias_C = test_values({24}, 4).requires_grad_(true);
    const at::Tensor d_sum_NC = test_values({5, 24}, 5), d_normed_NC = test_values({5, 24}, 6);
    const at::Tensor sum_NC = x_NC + y_NC;
    const at::Tensor normed_NC = at::layer_norm(
        sum_NC, {24}, weight_C, has_bias ? std::optional(bias_C) : std::nullopt, kEpsilon);
    ((sum_NC * d_sum_NC).sum() + (normed_NC * d_normed_NC).sum()).backward();

    const ResidualNorm forward = residual_norm(x_NC.detach(), y_NC.detach(), weight_C.detach(),
                                               has_bias ? bias_C.detach() : at::Tensor(), kEpsilon);
    EXPECT_LT(difference(forward.sum_NC, sum_NC), 1e-15);
    EXPECT_LT(difference(forward.normed_NC, normed_NC), 1e-12);
    const ResidualNormGradients gradients =
        residual_norm_backward(d_sum_NC, d_normed_NC, forward, weight_C.detach(), has_bias);
    EXPECT_LT(difference(gradients.d_x_NC, x_NC.grad()), 1e-12);
    EXPECT_LT(difference(gradients.d_x_NC, y_NC.grad()), 1e-12);
    EXPECT_LT(difference(gradients.d_weight_C, weight_C.grad()), 1e-12);
    EXPECT_EQ(gradients.d_bias_C.defined(), has_bias);
    if (has_bias) {
      EXPECT_LT(difference(gradients.d_bias_C, bias_C.grad()), 1e-12);
    }
  }
}

}  // namespace
}  // namespace birkhoff
