// Dense attention with the relative positions of Transformer-XL, against its formula, one pair of
// query and key at a time.
//
// Legend: B batch, H heads, L queries, S keys, D head dim, C channels.
#include "attention/sinusoidal_distances.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "attention/kernels/common/path.h"
#include "attention/kernels/row_normalizer/row_normalizer.h"
#include "cluster/base/error.h"
#include "tests/attention/mechanisms/mechanism_cases.h"

namespace birkhoff::test {
namespace {

constexpr std::int64_t kQueries = 7, kChannels = 5, kHeadDim = 3;

Built build(const std::string& dense, SinusoidalOptions options = {}, std::int64_t key_heads = 2,
            at::ScalarType dtype = at::kDouble) {
  configs::Mechanism config;
  config.mutable_dense();
  config.mutable_dense()->set_dropout(0.3);
  if (dense == "top_k") {
    config.mutable_dense()->set_normalizer(configs::DenseAttention::top_k);
    config.mutable_dense()->set_kept_keys(3);
  } else if (dense == "entmax15") {
    config.mutable_dense()->set_normalizer(configs::DenseAttention::entmax15);
  } else if (dense == "entmax") {
    config.mutable_dense()->set_normalizer(configs::DenseAttention::entmax);
  } else if (dense == "sparsemax") {
    config.mutable_dense()->set_normalizer(configs::DenseAttention::sparsemax);
  } else if (dense == "sink") {
    config.set_sink(true);
  }
  return {config,
          {.channels = kChannels,
           .heads = 2,
           .key_heads = key_heads,
           .head_dim = kHeadDim,
           .sequence_length = 32,
           .causal = true,
           .distances = options},
          dtype};
}

at::Tensor parameter(const Built& built, const std::string& name) {
  for (const Parameter& each : built.parameters.list()) {
    if (each.name == "attention." + name) return each.value;
  }
  return {};
}

AttentionInput input(std::int64_t earlier, std::int64_t key_heads = 2) {
  const std::int64_t keys = earlier + kQueries;
  const auto leaf = [](at::IntArrayRef shape, std::uint64_t seed) {
    return random_tensor(shape, at::kDouble, seed).set_requires_grad(true);
  };
  AttentionInput in;
  in.q_BHLD = leaf({2, 2, kQueries, kHeadDim}, 1);
  in.k_BHSD = leaf({2, key_heads, keys, kHeadDim}, 2);
  in.v_BHSD = leaf({2, key_heads, keys, kHeadDim}, 3);
  in.x_q_BLC = leaf({2, kQueries, kChannels}, 4);
  in.x_kv_BSC = leaf({2, keys, kChannels}, 5);
  return in;
}

NoiseKey noise() {
  return {.seed = 5,
          .step = at::full({1}, 3, at::kLong),
          .layer = 0,
          .sample_ids_B = at::arange(2, at::kLong)};
}

// The weights' formula, for each pair by itself.
at::Tensor by_formula(const Built& built, const AttentionInput& in, const RowNormalizer& normalizer,
                      const SinusoidalOptions& options = {}) {
  const at::Tensor W = parameter(built, "distance_keys"), u = parameter(built, "content_bias"),
                   v = parameter(built, "distance_bias");
  const std::int64_t L = in.q_BHLD.size(2), S = in.k_BHSD.size(2);
  const std::int64_t group = in.q_BHLD.size(1) / in.k_BHSD.size(1);
  std::vector<at::Tensor> heads;
  const at::Tensor mask_LS = at::zeros({L, S}, at::kBool);
  for (std::int64_t h = 0; h < in.q_BHLD.size(1); ++h) {
    std::vector<at::Tensor> rows;
    for (std::int64_t i = 0; i < L; ++i) {
      std::vector<at::Tensor> row;
      for (std::int64_t j = 0; j < S; ++j) {
        const std::int64_t distance = S - L + i - j;
        const bool in_window =
            options.evaluation_window == 0 || distance < options.evaluation_window;
        if (distance >= 0 && in_window) mask_LS[i][j].fill_(true);
        double d = static_cast<double>(std::max<std::int64_t>(distance, 0));
        if (options.evaluation_clamp > 0) {
          d = std::min(d, static_cast<double>(options.evaluation_clamp));
        }
        // Sines, then cosines, of wavelengths 10,000^(2i / C); an odd C lacks the last cosine.
        std::vector<double> r(kChannels);
        for (std::int64_t c = 0; c < kChannels; ++c) {
          const std::int64_t half = (kChannels + 1) / 2, n = c % half;
          const double angle = d / std::pow(1e4, 2.0 * static_cast<double>(n) / kChannels);
          r[static_cast<std::size_t>(c)] = c < half ? std::sin(angle) : std::cos(angle);
        }
        const at::Tensor key_of_distance = at::matmul(W[h], at::tensor(r, at::kDouble));
        const at::Tensor q_BD = in.q_BHLD.select(1, h).select(1, i),
                         k_BD = in.k_BHSD.select(1, h / group).select(1, j);
        row.push_back((((q_BD + u[h]) * k_BD).sum(1) + at::matmul(q_BD + v[h], key_of_distance)) /
                      std::sqrt(static_cast<double>(kHeadDim)));
      }
      rows.push_back(at::stack(row, 1));
    }
    heads.push_back(at::stack(rows, 1));
  }
  const at::Tensor p =
      normalize_rows(normalizer, at::stack(heads, 1), mask_LS, parameter(built, "sink"));
  return at::matmul(p, in.v_BHSD.repeat_interleave(group, 1));
}

RowNormalizer normalizer_of(const Built& built, const std::string& dense) {
  if (dense == "entmax") {
    return {.kind = Normalizer::kEntmax, .alpha_H = 1 + parameter(built, "exponent").sigmoid()};
  }
  if (dense == "top_k") return {.kind = Normalizer::kTopK, .top_k = 3};
  if (dense == "entmax15") return {.kind = Normalizer::kEntmax15};
  if (dense == "sparsemax") return {.kind = Normalizer::kSparsemax};
  return {};
}

TEST(SinusoidalDistances, OutputsAndGradientsAreThoseOfTheFormula) {
  for (const std::string dense : {"softmax", "top_k", "entmax15", "entmax", "sparsemax", "sink"}) {
    for (const std::int64_t earlier : {0, 1, 9}) {
      SCOPED_TRACE(dense + ", " + std::to_string(earlier));
      const std::int64_t key_heads = earlier == 1 ? 1 : 2;
      const Built built = build(dense, {}, key_heads);
      const AttentionInput in = input(earlier, key_heads);
      const at::Tensor expected = by_formula(built, in, normalizer_of(built, dense));
      for (const Path path : {Path::kReference, Path::kFused}) {
        const at::Tensor out = run(*built.mechanism, in, path);
        EXPECT_LE(max_difference(out, expected), 1e-13);
        const auto mine = gradients(out, leaves(in, built.parameters)),
                   of_formula = gradients(expected, leaves(in, built.parameters));
        for (std::size_t i = 0; i < mine.size(); ++i) {
          EXPECT_LE(max_difference(mine[i], of_formula[i]), 1e-12) << i;
        }
      }
      for (const char* name : {"distance_keys", "content_bias", "distance_bias"}) {
        const at::Tensor gradient = gradients(expected, {parameter(built, name)}).front();
        EXPECT_GT(gradient.abs().max().item<double>(), 1e-3) << name;
      }
    }
  }
}

TEST(SinusoidalDistances, LimitsHoldOnlyOutsideTraining) {
  const SinusoidalOptions options{.evaluation_clamp = 4, .evaluation_window = 6};
  for (const std::string dense : {"softmax", "top_k", "entmax15"}) {
    SCOPED_TRACE(dense);
    const Built limited = build(dense, options), free = build(dense);
    const RowNormalizer normalizer = normalizer_of(limited, dense);
    AttentionInput in = input(9);
    const at::Tensor out = run(*limited.mechanism, in, Path::kFused);
    EXPECT_LE(max_difference(out, by_formula(limited, in, normalizer, options)), 1e-13);
    for (const SinusoidalOptions one :
         {SinusoidalOptions{.evaluation_clamp = 4}, SinusoidalOptions{.evaluation_window = 6}}) {
      EXPECT_GT(max_difference(out, by_formula(limited, in, normalizer, one)), 1e-3);
    }
    in.noise = noise();
    EXPECT_TRUE(at::equal(run(*limited.mechanism, in, Path::kFused),
                          run(*free.mechanism, in, Path::kFused)));
  }
}

// Padding, documents, and dropout of the weights of keys of earlier tokens.
TEST(SinusoidalDistances, KernelsEqualTheReferenceWithMasksAndDropout) {
  for (const std::string dense : {"softmax", "sink", "top_k", "entmax15", "entmax", "sparsemax"}) {
    const Built built = build(dense, {.evaluation_window = 3});
    AttentionInput padded = input(0), documents = input(0), dropped = input(9);
    // Softmax with dropout has no kernel.
    const bool is_softmax = dense == "softmax" || dense == "sink";
    padded.key_lengths_B = at::tensor({4, 7}, at::kLong);
    documents.segments_q_BL = documents.segments_kv_BS =
        at::tensor({0, 0, 0, 1, 1, 1, 2, 0, 1, 1, 1, 1, 1, 1}, at::kLong).view({2, kQueries});
    if (!is_softmax) dropped.noise = noise();
    for (const AttentionInput& in : {padded, documents, dropped}) {
      SCOPED_TRACE(dense);
      at::Tensor fused;
      {
        const PathRecord record;
        fused = run(*built.mechanism, in, Path::kFused);
        ASSERT_EQ(record.taken().size(), 1u);
        EXPECT_EQ(record.taken()[0].why, "");
        EXPECT_EQ(record.taken()[0].path, Path::kFused);
      }
      const at::Tensor reference = run(*built.mechanism, in, Path::kReference);
      EXPECT_LE(max_difference(fused, reference), 1e-13);
      const auto of_fused = gradients(fused, leaves(in, built.parameters)),
                 of_reference = gradients(reference, leaves(in, built.parameters));
      for (std::size_t i = 0; i < of_fused.size(); ++i) {
        EXPECT_LE(max_difference(of_fused[i], of_reference[i]), 1e-12) << i;
      }
    }
  }
}

// Outputs and gradients, up to the one rounding to bf16 (2^-8) that both paths end with.
TEST(SinusoidalDistances, KernelsInBf16AreAsExactAsTheReference) {
  for (const std::string dense : {"softmax", "entmax15", "sparsemax"}) {
    SCOPED_TRACE(dense);
    const Built built = build(dense, {}, 2, at::kFloat), exact = build(dense);
    const auto solve = [](const Built& of, at::ScalarType dtype, Path path) {
      AttentionInput in = input(9);
      for (at::Tensor* x : {&in.q_BHLD, &in.k_BHSD, &in.v_BHSD}) {
        *x = x->detach().to(at::kBFloat16).to(dtype).set_requires_grad(true);
      }
      const at::Tensor out = run(*of.mechanism, in, path);
      EXPECT_EQ(out.scalar_type(), dtype);
      std::vector<at::Tensor> results{out};
      for (const at::Tensor& d : gradients(out, leaves(in, of.parameters))) results.push_back(d);
      return results;
    };
    const auto expected = solve(exact, at::kDouble, Path::kReference),
               reference = solve(built, at::kBFloat16, Path::kReference),
               fused = solve(built, at::kBFloat16, Path::kFused);
    for (std::size_t i = 0; i < fused.size(); ++i) {
      const double size = expected[i].abs().max().item<double>();
      EXPECT_LE(max_difference(fused[i], expected[i]),
                2 * max_difference(reference[i], expected[i]) + 0x1p-8 * size)
          << i;
    }
  }
}

TEST(SinusoidalDistances, WideHeadsTakeTheReference) {
  configs::Mechanism config;
  config.mutable_dense();
  for (const std::int64_t head_dim : {256, 257}) {
    const Built built{config,
                      {.channels = kChannels,
                       .heads = 1,
                       .head_dim = head_dim,
                       .sequence_length = 8,
                       .causal = true,
                       .distances = SinusoidalOptions{}},
                      at::kFloat};
    AttentionInput in;
    in.q_BHLD = in.k_BHSD = in.v_BHSD = random_tensor({1, 1, 8, head_dim}, at::kFloat, 1);
    const PathRecord record;
    run(*built.mechanism, in, Path::kFused);
    ASSERT_EQ(record.taken().size(), 1u);
    EXPECT_EQ(record.taken()[0].path, head_dim == 256 ? Path::kFused : Path::kReference);
  }
}

TEST(SinusoidalDistances, DecodingEqualsAllAtOnce) {
  for (const std::string dense : {"softmax", "top_k", "entmax"}) {
    for (const SinusoidalOptions options :
         {SinusoidalOptions{}, SinusoidalOptions{.evaluation_clamp = 2, .evaluation_window = 4}}) {
      const Built built = build(dense, options);
      const AttentionInput in = input(0);
      const at::Tensor expected = run(*built.mechanism, in, Path::kFused);
      const auto state = built.mechanism->decode_state(2);
      for (std::int64_t t = 0; t < kQueries; ++t) {
        const at::Tensor out = built.mechanism->decode_step(*state, token_slice(in, t, 1));
        EXPECT_LE(max_difference(out, expected.narrow(2, t, 1)), 1e-13) << t;
      }
    }
  }
}

TEST(SinusoidalDistances, OfOtherMechanismsAreRefused) {
  configs::Mechanism config;
  config.mutable_sliding_window()->set_width(4);
  Parameters parameters(1, at::kDouble);
  const MechanismShape shape{.channels = kChannels,
                             .heads = 2,
                             .head_dim = kHeadDim,
                             .sequence_length = 32,
                             .causal = true,
                             .distances = SinusoidalOptions{}};
  try {
    make_mechanism(config, shape, "attention", parameters);
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("relative_sinusoidal"), std::string::npos);
  }
}

}  // namespace
}  // namespace birkhoff::test
