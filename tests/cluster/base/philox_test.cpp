#include "cluster/base/random/philox.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cmath>

#include "cluster/base/error.h"

namespace birkhoff {
namespace {

NoiseKey make_key(std::int64_t step, std::vector<std::int64_t> ids) {
  return {42, at::full({1}, step, at::kLong), 3, at::tensor(ids, at::kLong)};
}

std::uint64_t join(std::uint32_t low, std::uint32_t high) {
  return std::uint64_t{high} << 32 | low;
}

// kat_vectors of Random123 (Salmon et al. 2011), philox4x32 with 10 rounds.
TEST(Philox, KnownAnswers) {
  using Block = std::array<std::uint32_t, 4>;
  EXPECT_EQ(philox(0, 0, 0), (Block{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox(~0ull, ~0ull, ~0ull), (Block{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox(join(0xa4093822, 0x299f31d0), join(0x13198a2e, 0x03707344),
                   join(0x243f6a88, 0x85a308d3)),
            (Block{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, UniformIsNeverZeroAndReachesOne) {
  EXPECT_EQ(uniform_from_bits(0), std::ldexp(1.0f, -24));
  EXPECT_EQ(uniform_from_bits(0xff), std::ldexp(1.0f, -24));
  EXPECT_EQ(uniform_from_bits(0x100), std::ldexp(1.0f, -23));
  EXPECT_EQ(uniform_from_bits(0xffffffff), 1.0f);
}

// The vector paths against the documented formula, one element at a time, for lengths around every
// block size.
TEST(Philox, UniformIsTheDocumentedFormula) {
  const std::vector<std::int64_t> ids{7, 0, 1ll << 40};
  for (const std::int64_t n : {1, 3, 4, 31, 32, 33, 4095, 4097, 10000}) {
    for (const std::uint64_t offset : {0ull, 5ull, (1ull << 32) - 3}) {
      const at::Tensor u = philox_uniform(make_key(9, ids), NoisePurpose::kGumbel, {n}, offset);
      ASSERT_EQ(u.sizes(), (at::IntArrayRef{3, n}));
      const float* values = u.const_data_ptr<float>();
      const std::uint64_t key = noise_key(42, 9, 3, NoisePurpose::kGumbel);
      for (std::size_t row = 0; row < ids.size(); ++row) {
        for (std::int64_t e = 0; e < n; ++e) {
          const auto i = static_cast<std::uint64_t>(e);
          const auto block = philox(key, static_cast<std::uint64_t>(ids[row]), i / 4 + offset);
          ASSERT_EQ(*values++, uniform_from_bits(block[i % 4])) << row << " " << e;
        }
      }
    }
  }
}

TEST(Philox, NoiseDependsOnTheSampleAloneNotOnBatchOrThreads) {
  const auto draw = [](std::vector<std::int64_t> ids) {
    return philox_uniform(make_key(1, std::move(ids)), NoisePurpose::kResidualDropout, {70, 301});
  };
  const int num_threads = at::get_num_threads();
  at::set_num_threads(1);
  const at::Tensor whole = draw({10, 11, 12, 13});
  at::set_num_threads(3);
  EXPECT_TRUE(at::equal(whole, draw({10, 11, 12, 13})));
  at::set_num_threads(num_threads);
  EXPECT_TRUE(at::equal(whole, at::cat({draw({10}), draw({11, 12}), draw({13})})));
  EXPECT_TRUE(at::equal(whole.flip(0), draw({13, 12, 11, 10})));
}

TEST(Philox, EveryPartOfTheKeyMatters) {
  const auto key = [](std::uint64_t seed, std::uint64_t step, std::uint32_t layer,
                      NoisePurpose purpose) { return noise_key(seed, step, layer, purpose); };
  const std::vector<std::uint64_t> keys{
      key(1, 2, 3, NoisePurpose::kGumbel),          key(2, 2, 3, NoisePurpose::kGumbel),
      key(1, 3, 3, NoisePurpose::kGumbel),          key(1, 2, 4, NoisePurpose::kGumbel),
      key(1, 2, 3, NoisePurpose::kResidualDropout), key(2, 1, 3, NoisePurpose::kGumbel)};
  for (std::size_t i = 0; i < keys.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) EXPECT_NE(keys[i], keys[j]);
  }
  const NoiseKey base = make_key(1, {5});
  EXPECT_EQ(base.at_layer(8).layer, 8u);
  EXPECT_FALSE(at::equal(philox_uniform(base, NoisePurpose::kGumbel, {16}),
                         philox_uniform(base.at_layer(8), NoisePurpose::kGumbel, {16})));
}

// Bounds of five standard deviations; the draws are fixed, so the result never varies.
TEST(Philox, UniformMomentsAndCorrelations) {
  const std::int64_t n = 1 << 20;
  const at::Tensor u =
      philox_uniform(make_key(0, {0, 1}), NoisePurpose::kSampling, {n}).to(at::kDouble);
  const double count = static_cast<double>(2 * n);
  EXPECT_NEAR(u.mean().item<double>(), 0.5, 5 * std::sqrt(1 / 12.0 / count));
  EXPECT_NEAR(u.var().item<double>(), 1 / 12.0, 5 * std::sqrt(1 / 180.0 / count));
  const at::Tensor centred = (u - 0.5) * std::sqrt(12.0);
  const double sigma = 1 / std::sqrt(static_cast<double>(n));
  EXPECT_NEAR((centred[0] * centred[1]).mean().item<double>(), 0, 5 * sigma);  // between samples
  for (const std::int64_t lag : {1, 2, 4, 32, 4096}) {
    const at::Tensor row = centred[0];
    EXPECT_NEAR((row.slice(0, 0, n - lag) * row.slice(0, lag, n)).mean().item<double>(), 0,
                5 * sigma)
        << lag;
  }
  const at::Tensor histogram = at::histc(u, 64, 0, 1);
  const double expected = count / 64;
  const double chi2 = ((histogram - expected).pow(2) / expected).sum().item<double>();
  EXPECT_NEAR(chi2, 63, 5 * std::sqrt(2 * 63.0));
}

TEST(Philox, GumbelIsFiniteAndHasItsMoments) {
  const at::Tensor g =
      philox_gumbel(make_key(0, {0, 1, 2, 3}), NoisePurpose::kGumbel, {1 << 18}).to(at::kDouble);
  EXPECT_TRUE(at::isfinite(g).all().item<bool>());
  const double count = static_cast<double>(g.numel());
  const double variance = M_PI * M_PI / 6;
  EXPECT_NEAR(g.mean().item<double>(), 0.57721566, 5 * std::sqrt(variance / count));
  EXPECT_NEAR(g.var().item<double>(), variance, 5 * std::sqrt(4.4 * variance * variance / count));
}

TEST(Philox, DropoutKeepsTheExpectationAndScalesTheGradient) {
  const NoiseKey key = make_key(4, {3, 9});
  const at::Tensor x = at::ones({2, 300, 500}).set_requires_grad(true);
  const float p = 0.25f;
  const at::Tensor y = philox_dropout(x, p, key, NoisePurpose::kResidualDropout);
  const at::Tensor u = philox_uniform(key, NoisePurpose::kResidualDropout, {300, 500});
  EXPECT_TRUE(at::equal(y.detach(), (u > p).to(at::kFloat) / (1 - p)));
  const double kept = (y > 0).to(at::kDouble).mean().item<double>();
  EXPECT_NEAR(kept, 0.75, 5 * std::sqrt(0.75 * 0.25 / static_cast<double>(y.numel())));
  y.sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), y.detach()));
  EXPECT_TRUE(philox_dropout(x, 0, key, NoisePurpose::kResidualDropout).is_same(x));
  for (const at::ScalarType dtype : {at::kBFloat16, at::kDouble}) {
    const at::Tensor other =
        philox_dropout(x.detach().to(dtype), p, key, NoisePurpose::kResidualDropout);
    EXPECT_EQ(other.scalar_type(), dtype);
    EXPECT_TRUE(at::equal(other, y.detach().to(dtype)));
  }
}

TEST(Philox, RowsOfDropoutBeginWhereTheirStrideSays) {
  const NoiseKey key = make_key(4, {3, 9});
  const float p = 0.25f;
  const at::Tensor u = philox_uniform(key, NoisePurpose::kAttentionDropout, {5 * 64}),
                   factors = philox_dropout_rows(p, key, NoisePurpose::kAttentionDropout,
                                                 /*num_rows=*/5, /*row_size=*/37,
                                                 /*row_stride=*/64);
  EXPECT_TRUE(
      at::equal(factors, ((u > p).to(at::kFloat) / (1 - p)).view({2, 5, 64}).narrow(2, 0, 37)));
  // Far beyond what a tensor can hold.
  const auto far = static_cast<std::uint64_t>(3) << 60;
  EXPECT_TRUE(at::equal(
      philox_dropout_rows(p, key, NoisePurpose::kAttentionDropout, 4, 8, std::int64_t{1} << 60)
          .select(1, 3),
      (philox_uniform(key, NoisePurpose::kAttentionDropout, {8}, far / 4) > p).to(at::kFloat) /
          (1 - p)));
  EXPECT_THROW(philox_dropout_rows(p, key, NoisePurpose::kAttentionDropout, 4, 8, 6), Error);
}

// Windows of every size and place in [B, rows, columns], with columns that begin within a counter.
TEST(Philox, DropoutOfAWindowIsThatOfTheWholeTensor) {
  for (const std::int64_t columns : {8, 12, 7}) {
    NoiseKey key = make_key(7, {5, 9, 2});
    constexpr std::int64_t kRows = 6;
    const at::Tensor whole_RC =
        philox_dropout(at::ones({3, kRows, columns}), 0.4f, key, NoisePurpose::kResidualDropout)
            .flatten(0, 1);
    for (const std::int64_t first_row : {0, 4, 11}) {
      for (const std::int64_t first_column : {0, 4, 3}) {
        const std::int64_t rows = 3 * kRows - first_row, size = columns - first_column;
        // Two rows more than there are.
        const at::Tensor window =
            philox_dropout(at::ones({rows + 2, size}), 0.4f, key, NoisePurpose::kResidualDropout,
                           {.rows = kRows,
                            .columns = columns,
                            .first_row = first_row,
                            .first_column = first_column});
        EXPECT_TRUE(at::equal(window.narrow(0, 0, rows),
                              whole_RC.narrow(0, first_row, rows).narrow(1, first_column, size)))
            << columns << " columns from " << first_row << ", " << first_column;
      }
    }
    // Heads of another rank.
    const at::Tensor all_BHn =
        philox_dropout(at::ones({3, 4, 5, 3}), 0.4f, key, NoisePurpose::kAttentionDropout);
    key.first_head = 1;
    key.all_heads = 4;
    EXPECT_TRUE(at::equal(
        philox_dropout(at::ones({3, 2, 5, 3}), 0.4f, key, NoisePurpose::kAttentionDropout),
        all_BHn.narrow(1, 1, 2)));
  }
}

TEST(Philox, MisuseIsAnError) {
  NoiseKey key = make_key(0, {1, 2});
  EXPECT_THROW(philox_dropout(at::ones({3, 4}), 0.5f, key, NoisePurpose::kGumbel), Error);
  EXPECT_THROW(philox_dropout(at::ones({2, 4}), 1.0f, key, NoisePurpose::kGumbel), Error);
  key.sample_ids_B = at::ones({2});
  EXPECT_THROW(philox_uniform(key, NoisePurpose::kGumbel, {4}), Error);
  EXPECT_EQ(philox_uniform(make_key(0, {}), NoisePurpose::kGumbel, {4}).numel(), 0);
}

}  // namespace
}  // namespace birkhoff
