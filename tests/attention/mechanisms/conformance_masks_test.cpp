// Requirements on every mechanism with padding, documents and noise.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/attention/mechanisms/mechanism_cases.h"

namespace birkhoff::test {
namespace {

class Masks : public ::testing::TestWithParam<MechanismCase> {
 protected:
  Built build(at::ScalarType dtype) const {
    return Built(GetParam().config, GetParam().causal, dtype);
  }
  AttentionInput input(const Built& built, std::int64_t tokens = kTokens,
                       at::ScalarType dtype = at::kDouble) const {
    return random_input(tokens, dtype, 1, built.traits);
  }
};

class CausalMasks : public Masks {};
// Mechanisms whose gradient is exactly that of their output.
class ExactMasks : public Masks {};
// Mechanisms that add noise in training.
class NoisyMasks : public Masks {};

INSTANTIATE_TEST_SUITE_P(All, Masks, ::testing::ValuesIn(all_cases()), name_of);
INSTANTIATE_TEST_SUITE_P(All, NoisyMasks, ::testing::ValuesIn(cases_where(has_noise)), name_of);
INSTANTIATE_TEST_SUITE_P(All, ExactMasks,
                         ::testing::ValuesIn(cases_where([](const MechanismCase&,
                                                            const MechanismTraits& traits) {
                           return !traits.approximate_gradient;
                         })),
                         name_of);
INSTANTIATE_TEST_SUITE_P(All, CausalMasks, ::testing::ValuesIn(cases_where(is_causal)), name_of);

at::Tensor lengths(std::int64_t first, std::int64_t second) {
  return at::tensor({first, second}, at::kLong);
}

// Two documents per row, with borders inside a block and at a block's border.
void set_segments(AttentionInput& in, std::int64_t first_border, std::int64_t second_border) {
  const at::Tensor index_L = at::arange(in.q_BHLD.size(2));
  in.segments_q_BL = in.segments_kv_BS =
      at::stack({index_L >= first_border, index_L >= second_border}).to(at::kInt);
}

// The gradient of everything together, against a finite difference along a random direction, with
// every mask there is: an empty row, padding, documents, an odd length.
TEST_P(ExactMasks, GradientsEqualFiniteDifferences) {
  const Built built = build(at::kDouble);
  const at::Tensor weights = random_tensor({2, 2, 11, 3}, at::kDouble, 7);
  for (int masks = 0; masks < 4; ++masks) {
    AttentionInput in = input(built, 11);
    if (masks & 1) in.key_lengths_B = lengths(masks == 3 ? 9 : 0, 7);
    if (masks & 2) set_segments(in, 6, 4);
    const auto all = leaves(in, built.parameters);
    for (const Path path : {Path::kReference, Path::kFused}) {
      const auto d = gradients(run(*built.mechanism, in, path), all, 7);
      at::NoGradGuard no_grad;
      const auto direction = [&](std::size_t i) {
        return random_tensor(all[i].sizes(), at::kDouble, 90 + i);
      };
      const auto move = [&](double distance) {
        for (std::size_t i = 0; i < all.size(); ++i) all[i].data().add_(direction(i), distance);
      };
      const auto loss = [&] {
        return (run(*built.mechanism, in, path) * weights).sum().item<double>();
      };
      const double step = 1e-6;
      move(step);
      const double above = loss();
      move(-2 * step);
      const double difference = (above - loss()) / (2 * step);
      move(step);
      double derivative = 0;
      for (std::size_t i = 0; i < all.size(); ++i) {
        derivative += (d[i] * direction(i)).sum().item<double>();
      }
      EXPECT_NEAR(derivative, difference, 3e-7 * std::max(1.0, std::abs(difference)))
          << "masks " << masks;
    }
  }
}

// Kernel against reference under masks.
TEST_P(Masks, ForwardEqualsReference) {
  const Built built = build(at::kDouble);
  for (int masks = 1; masks < 4; ++masks) {
    AttentionInput in = input(built);
    if (masks & 1) in.key_lengths_B = lengths(14, 9);
    if (masks & 2) set_segments(in, 6, 8);
    const at::Tensor reference = run(*built.mechanism, in, Path::kReference);
    const at::Tensor forward = run(*built.mechanism, in, Path::kFused);
    EXPECT_LE(max_difference(forward, reference),
              1e-11 * std::max(1.0, reference.abs().max().item<double>()));
  }
}

// Padding changes nothing, whatever it holds: as if it were not there.
TEST_P(Masks, PaddingIsInvisible) {
  const Built built = build(at::kDouble);
  for (const std::int64_t valid : {9, 12}) {
    AttentionInput padded = input(built, 21);
    const AttentionInput in = token_slice(padded, 0, valid);
    padded = replace_tokens(padded, valid, 21, 77);
    padded.key_lengths_B = lengths(valid, valid);
    for (const Path path : {Path::kReference, Path::kFused}) {
      const at::Tensor out = run(*built.mechanism, in, path);
      EXPECT_LE(max_difference(run(*built.mechanism, padded, path).narrow(2, 0, valid), out),
                1e-11 * std::max(1.0, out.abs().max().item<double>()));
    }
  }
}

// Rows without a visible key give 0 and no gradient, not NaN.
TEST_P(Masks, NoLegalKeyGivesZero) {
  const Built built = build(at::kFloat);
  AttentionInput in = input(built, kTokens, at::kFloat);
  in.key_lengths_B = lengths(0, 14);
  for (const Path path : {Path::kReference, Path::kFused}) {
    const at::Tensor out = run(*built.mechanism, in, path);
    EXPECT_EQ(out[0].abs().max().item<float>(), 0);
    const at::Tensor size_HLD = out[1].abs();
    EXPECT_GT((built.traits.skips_queries ? size_HLD.max() : size_HLD.min()).item<float>(), 0);
    const auto d = gradients(out, leaves(in, built.parameters));
    for (const at::Tensor& gradient : d) EXPECT_TRUE(gradient.isfinite().all().item<bool>());
    for (int i = 0; i < 3; ++i) EXPECT_EQ(d[i][0].abs().max().item<float>(), 0) << "leaf " << i;
  }
}

// A document does not see its neighbours, not even through pooling, balance or the other tokens of
// a block.
TEST_P(Masks, DocumentsAreIsolated) {
  const Built built = build(at::kDouble);
  for (const std::int64_t border : {6, 8}) {
    AttentionInput in = input(built, 21);
    set_segments(in, border, border);
    AttentionInput other_first = replace_tokens(in, 0, border, 5);
    AttentionInput other_second = replace_tokens(in, border, 21, 6);
    for (const Path path : {Path::kReference, Path::kFused}) {
      const at::Tensor out = run(*built.mechanism, in, path);
      const double tolerance = 1e-11 * std::max(1.0, out.abs().max().item<double>());
      const at::Tensor with_first = run(*built.mechanism, other_first, path);
      const at::Tensor with_second = run(*built.mechanism, other_second, path);
      EXPECT_LE(max_difference(out.narrow(2, border, 21 - border),
                               with_first.narrow(2, border, 21 - border)),
                tolerance);
      EXPECT_LE(max_difference(out.narrow(2, 0, border), with_second.narrow(2, 0, border)),
                tolerance);
      EXPECT_GT(max_difference(out.narrow(2, 0, border), with_first.narrow(2, 0, border)), 1e-3);
    }
  }
}

// Documents do not make the future visible.
TEST_P(CausalMasks, FutureTokensDoNotChangeABitOfPackedDocuments) {
  const Built built = build(at::kFloat);
  AttentionInput in = input(built, 21, at::kFloat);
  set_segments(in, 6, 8);
  for (const Path path : {Path::kReference, Path::kFused}) {
    const at::Tensor out = run(*built.mechanism, in, path);
    for (const std::int64_t t : {5, 7, 8, 12, 13, 16, 18}) {
      const at::Tensor changed = run(*built.mechanism, replace_tokens(in, t, 21, 50), path);
      EXPECT_TRUE(is_same(out.narrow(2, 0, t), changed.narrow(2, 0, t), built.traits, path))
          << "t " << t;
    }
  }
}

NoiseKey noise(std::int64_t step) {
  return {.seed = 5,
          .step = at::full({1}, step, at::kLong),
          .layer = 2,
          .sample_ids_B = at::tensor({41, 97}, at::kLong)};
}

// Noise belongs to a sample and a step, however the batch is cut. Without a key there is no noise.
TEST_P(NoisyMasks, NoiseFollowsSampleAndStep) {
  const Built built(with_noise(GetParam().config), GetParam().causal, at::kDouble);
  const Built quiet = build(at::kDouble);
  AttentionInput in = input(built);
  const Path path = Path::kFused;
  const at::Tensor without = run(*built.mechanism, in, path);
  const double scale = std::max(1.0, without.abs().max().item<double>());
  EXPECT_LE(max_difference(without, run(*quiet.mechanism, in, path)), 1e-12 * scale);
  in.noise = noise(3);
  const at::Tensor with = run(*built.mechanism, in, path);
  EXPECT_GT(max_difference(with, without), 1e-3);
  EXPECT_TRUE(at::equal(with, run(*built.mechanism, in, path)));
  EXPECT_LE(max_difference(with, run(*built.mechanism, in, Path::kReference)),
            1e-10 * std::max(1.0, with.abs().max().item<double>()));
  const at::Tensor second = run(*built.mechanism, batch_slice(in, 1, 1), path);
  EXPECT_LE(max_difference(second, with.narrow(0, 1, 1)), 1e-11 * scale);
  in.noise = noise(4);
  EXPECT_GT(max_difference(with, run(*built.mechanism, in, path)), 1e-3);
}

// Documents and padding of the other samples do not move it either, in outputs and gradients.
TEST_P(NoisyMasks, NoiseOfASampleDoesNotDependOnTheOthers) {
  const Built built(with_noise(GetParam().config), GetParam().causal, at::kDouble);
  AttentionInput in = input(built);
  in.key_lengths_B = lengths(14, 9);
  set_segments(in, 5, 14);
  in.noise = noise(3);
  const AttentionInput second = batch_slice(in, 1, 1);
  for (const Path path : {Path::kReference, Path::kFused}) {
    const at::Tensor out = run(*built.mechanism, in, path).narrow(0, 1, 1),
                     alone = run(*built.mechanism, second, path);
    EXPECT_LE(max_difference(alone, out), 1e-11 * std::max(1.0, out.abs().max().item<double>()));
    const at::Tensor d = gradients(out, {in.q_BHLD})[0].narrow(0, 1, 1),
                     d_alone = gradients(alone, {second.q_BHLD})[0];
    EXPECT_LE(max_difference(d_alone, d), 1e-10 * std::max(1.0, d.abs().max().item<double>()));
  }
}

}  // namespace
}  // namespace birkhoff::test
