#include "models/losses/loss_sums.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

namespace birkhoff {
namespace {

struct Case {
  at::Tensor logits_BTV, targets_BT, mask_BT;
};

// 2 x 3 tokens, 5 ids; two tokens do not count, and one of those has an id that does not exist.
Case make_case(at::ScalarType dtype) {
  const at::Tensor n = at::arange(30, at::kDouble);
  Case c{.logits_BTV = (n.mul(1.7).sin() * 4).view({2, 3, 5}).to(dtype).set_requires_grad(true),
         .targets_BT = at::tensor({0, 4, 2, 999, 1, 3}, at::kLong).view({2, 3}),
         .mask_BT = at::tensor({1, 1, 0, 0, 1, 1}, at::kByte).view({2, 3})};
  return c;
}

// By definition, in plain arithmetic: the nats, and the gradient (softmax - one-hot) * mask.
double expected_nats(const Case& c, at::Tensor* gradient_BTV) {
  const at::Tensor logits = c.logits_BTV.detach().to(at::kDouble);
  *gradient_BTV = at::zeros_like(logits);
  double nats = 0;
  for (int b = 0; b < 2; ++b) {
    for (int t = 0; t < 3; ++t) {
      if (c.mask_BT[b][t].item<int>() == 0) continue;
      double sum = 0;
      for (int v = 0; v < 5; ++v) sum += std::exp(logits[b][t][v].item<double>());
      const auto target = c.targets_BT[b][t].item<std::int64_t>();
      nats += std::log(sum) - logits[b][t][target].item<double>();
      for (int v = 0; v < 5; ++v) {
        const double p = std::exp(logits[b][t][v].item<double>()) / sum;
        (*gradient_BTV)[b][t][v] = p - (v == target ? 1 : 0);
      }
    }
  }
  return nats;
}

TEST(LossSums, EqualsTheDefinitionInDoublePrecision) {
  const Case c = make_case(at::kDouble);
  at::Tensor gradient_BTV;
  const double nats = expected_nats(c, &gradient_BTV);
  const LossSums sums = cross_entropy_sums(c.logits_BTV, c.targets_BT, c.mask_BT);
  EXPECT_NEAR(sums.nats.item<double>(), nats, 1e-12);
  EXPECT_NEAR(sums.loss.item<double>(), nats, 1e-12);
  EXPECT_EQ(sums.count.item<double>(), 4);
  sums.loss.backward();
  EXPECT_LT((c.logits_BTV.grad() - gradient_BTV).abs().max().item<double>(), 1e-12);
}

// -log p averaged over the smoothed targets, in plain arithmetic and by its autograd.
TEST(LossSums, LabelSmoothingIsInTheLossAndNotInTheNats) {
  for (const double smoothing : {0.1, 0.5}) {
    const Case c = make_case(at::kDouble), plain = make_case(at::kDouble);
    const LossSums sums = cross_entropy_sums(c.logits_BTV, c.targets_BT, c.mask_BT, smoothing);
    at::Tensor unused;
    EXPECT_NEAR(sums.nats.item<double>(), expected_nats(c, &unused), 1e-12);
    at::Tensor expected = at::zeros({}, at::kDouble);
    for (int b = 0; b < 2; ++b) {
      for (int t = 0; t < 3; ++t) {
        if (plain.mask_BT[b][t].item<int>() == 0) continue;
        const at::Tensor p_V = plain.logits_BTV[b][t].softmax(-1);
        for (int v = 0; v < 5; ++v) {
          const bool is_target = v == plain.targets_BT[b][t].item<std::int64_t>();
          expected = expected - p_V[v].log() * (smoothing / 5 + (is_target ? 1 - smoothing : 0));
        }
      }
    }
    EXPECT_NEAR(sums.loss.item<double>(), expected.item<double>(), 1e-12);
    sums.loss.backward();
    expected.backward();
    EXPECT_LT((c.logits_BTV.grad() - plain.logits_BTV.grad()).abs().max().item<double>(), 1e-12);
  }
}

TEST(LossSums, SinglePrecisionIsCloseAndSumsAreDouble) {
  const Case c = make_case(at::kFloat);
  at::Tensor gradient_BTV;
  const double nats = expected_nats(c, &gradient_BTV);
  const LossSums sums = cross_entropy_sums(c.logits_BTV, c.targets_BT, c.mask_BT);
  EXPECT_EQ(sums.nats.scalar_type(), at::kDouble);
  EXPECT_EQ(sums.count.scalar_type(), at::kDouble);
  EXPECT_FALSE(sums.nats.requires_grad());
  EXPECT_NEAR(sums.nats.item<double>(), nats, 1e-6 * nats);
  sums.loss.backward();
  EXPECT_LT((c.logits_BTV.grad() - gradient_BTV).abs().max().item<double>(), 1e-6);
}

TEST(LossSums, HalfPrecisionLogitsAreNormalisedInSinglePrecision) {
  const Case c = make_case(at::kFloat);
  const at::Tensor rounded = c.logits_BTV.detach().to(at::kBFloat16);
  const double low = cross_entropy_sums(rounded, c.targets_BT, c.mask_BT).nats.item<double>();
  const double high =
      cross_entropy_sums(rounded.to(at::kFloat), c.targets_BT, c.mask_BT).nats.item<double>();
  EXPECT_EQ(low, high);
}

TEST(LossSums, NothingCounted) {
  Case c = make_case(at::kDouble);
  c.mask_BT.zero_();
  const LossSums sums = cross_entropy_sums(c.logits_BTV, c.targets_BT, c.mask_BT);
  EXPECT_EQ(sums.loss.item<double>(), 0);
  EXPECT_EQ(sums.count.item<double>(), 0);
  sums.loss.backward();
  EXPECT_EQ(c.logits_BTV.grad().abs().max().item<double>(), 0);
}

}  // namespace
}  // namespace birkhoff
