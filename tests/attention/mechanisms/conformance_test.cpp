// Requirements on every mechanism, for one document without padding. Legend: B batch, H heads, L
// queries, S keys, D head dim, C channels.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "cluster/base/error.h"
#include "tests/attention/mechanisms/mechanism_cases.h"

namespace birkhoff::test {
namespace {

class Conformance : public ::testing::TestWithParam<MechanismCase> {
 protected:
  const configs::Mechanism& config() const { return GetParam().config; }
  Built build(at::ScalarType dtype) const { return Built(config(), GetParam().causal, dtype); }
  AttentionInput input(const Built& built, at::ScalarType dtype, std::uint64_t seed = 1) const {
    return random_input(kTokens, dtype, seed, built.traits);
  }
};

// Mechanisms whose outputs at t depend only on inputs at <= t.
class CausalConformance : public Conformance {};
// Mechanisms that decode, exactly or not.
class DecodingConformance : public Conformance {};
// Mechanisms whose outputs are weighted means of values.
class ConvexConformance : public Conformance {};

INSTANTIATE_TEST_SUITE_P(All, Conformance, ::testing::ValuesIn(all_cases()), name_of);
INSTANTIATE_TEST_SUITE_P(All, CausalConformance, ::testing::ValuesIn(cases_where(is_causal)),
                         name_of);
INSTANTIATE_TEST_SUITE_P(All, DecodingConformance,
                         ::testing::ValuesIn(cases_where([](const MechanismCase& each,
                                                            const MechanismTraits&) {
                           return each.causal;
                         })),
                         name_of);
INSTANTIATE_TEST_SUITE_P(All, ConvexConformance,
                         ::testing::ValuesIn(cases_where([](const MechanismCase&,
                                                            const MechanismTraits& traits) {
                           return traits.convex;
                         })),
                         name_of);

// Outputs before a change are equal bit for bit: at first and last tokens, at block borders and
// between them.
TEST_P(CausalConformance, FutureTokensDoNotChangeABit) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    const Built built = build(dtype);
    ASSERT_TRUE(built.traits.causal);
    const AttentionInput in = input(built, dtype);
    for (const Path path : {Path::kReference, Path::kFused}) {
      const at::Tensor out = run(*built.mechanism, in, path);
      for (const std::int64_t t : {1, 3, 4, 6, 7, 8, 12, 13}) {
        const AttentionInput changed = replace_tokens(in, t, kTokens, 50);
        const at::Tensor changed_out = run(*built.mechanism, changed, path);
        EXPECT_TRUE(is_same(out.narrow(2, 0, t), changed_out.narrow(2, 0, t), built.traits, path))
            << "t " << t;
        EXPECT_FALSE(at::equal(out, changed_out)) << "t " << t;
      }
    }
  }
}

// Appended blocks do not change earlier outputs either.
TEST_P(CausalConformance, AppendedTokensChangeNothing) {
  const Built built = build(at::kDouble);
  const AttentionInput longer = random_input(25, at::kDouble, 1, built.traits);
  const AttentionInput in = token_slice(longer, 0, kTokens);
  for (const Path path : {Path::kReference, Path::kFused}) {
    EXPECT_LE(max_difference(run(*built.mechanism, in, path),
                             run(*built.mechanism, longer, path).narrow(2, 0, kTokens)),
              1e-12);
  }
}

// At the size of a real run, where GEMMs are tiled and threads share them: at a block's border and
// next to it.
TEST(LongSequence, FutureTokensDoNotChangeABit) {
  constexpr std::int64_t kLength = 1024, kLongBlock = 64, kChannels = 32;
  const at::NoGradGuard no_grad;
  AttentionInput in;
  const std::vector<std::int64_t> heads = {1, 2, kLength, 32};
  in.q_BHLD = random_tensor(heads, at::kFloat, 1);
  in.k_BHSD = random_tensor(heads, at::kFloat, 2);
  in.v_BHSD = random_tensor(heads, at::kFloat, 3);
  in.x_q_BLC = in.x_kv_BSC = random_tensor({1, kLength, kChannels}, at::kFloat, 4);
  for (const MechanismCase& each : cases_where(is_causal, kLongBlock)) {
    SCOPED_TRACE(each.name);
    const Built built(each.config,
                      {.channels = kChannels,
                       .heads = 2,
                       .head_dim = 32,
                       .sequence_length = kLength,
                       .causal = true},
                      at::kFloat);
    const at::Tensor out = run(*built.mechanism, in, Path::kFused);
    for (const std::int64_t t : {511, 512, 513}) {
      const at::Tensor changed =
          run(*built.mechanism, replace_tokens(in, t, kLength, 50), Path::kFused);
      EXPECT_TRUE(at::equal(out.narrow(2, 0, t), changed.narrow(2, 0, t))) << t;
      EXPECT_GT(max_difference(out.select(2, t), changed.select(2, t)), 1e-3) << t;
    }
  }
}

// Keys and values reach exactly the queries that visible_keys names, and a layer input reaches no
// earlier query.
TEST_P(Conformance, GradientsReachVisibleKeysAlone) {
  const Built built = build(at::kDouble);
  const AttentionInput in = input(built, at::kDouble);
  const at::Tensor visible_LS = built.mechanism->visible_keys(kTokens, kTokens);
  ASSERT_EQ(visible_LS.sizes(), at::IntArrayRef({kTokens, kTokens}));
  const at::Tensor out = run(*built.mechanism, in, Path::kFused);
  for (std::int64_t i = 0; i < kTokens; ++i) {
    const auto d = gradients(out.select(2, i), {in.k_BHSD, in.v_BHSD, in.x_q_BLC});
    at::Tensor reached_S = (d[0].abs() + d[1].abs()).sum({0, 1, 3}) > 0;
    if (built.traits.selects) {
      EXPECT_FALSE(at::logical_and(reached_S, visible_LS[i].logical_not()).any().item<bool>());
      EXPECT_TRUE(built.traits.skips_queries || reached_S.any().item<bool>());
    } else {
      EXPECT_TRUE(at::equal(reached_S, visible_LS[i])) << "query " << i << "\n" << reached_S;
    }
    if (built.traits.causal) {
      EXPECT_EQ(d[2].narrow(1, i + 1, kTokens - i - 1).abs().sum().item<double>(), 0);
    }
  }
}

// Decoding token by token gives the same as the whole sequence.
TEST_P(DecodingConformance, DecodingEqualsForward) {
  for (const auto& [dtype, tolerance] :
       {std::pair(at::kDouble, 1e-12), std::pair(at::kFloat, 1e-5)}) {
    const Built built = build(dtype);
    at::NoGradGuard no_grad;
    const AttentionInput in = input(built, dtype);
    const at::Tensor out = run(*built.mechanism, in, Path::kFused);
    const auto state = built.mechanism->decode_state(2);
    double worst = 0;
    for (std::int64_t t = 0; t < kTokens; ++t) {
      const at::Tensor step = built.mechanism->decode_step(*state, token_slice(in, t, 1));
      ASSERT_EQ(step.sizes(), at::IntArrayRef({2, 2, 1, 3}));
      worst = std::max(worst, max_difference(step, out.narrow(2, t, 1)) /
                                  std::max(1.0, step.abs().max().item<double>()));
    }
    if (built.traits.exact_in_decoding) {
      EXPECT_LE(worst, tolerance);
    } else {
      EXPECT_GT(worst, 1e-3) << "a leak that is declared but absent";
    }
  }
}

AttentionInput select_rows(AttentionInput in, const at::Tensor& rows_B) {
  for (at::Tensor* each : {&in.q_BHLD, &in.k_BHSD, &in.v_BHSD, &in.x_q_BLC, &in.x_kv_BSC}) {
    if (each->defined()) *each = each->index_select(0, rows_B);
  }
  return in;
}

// A state whose rows were reordered, repeated and dropped, inside a block and at its start,
// continues like one that decoded those rows from the beginning.
TEST_P(DecodingConformance, RowsOfAStateCanBeSelected) {
  const Built built = build(at::kDouble);
  at::NoGradGuard no_grad;
  const AttentionInput in = input(built, at::kDouble);
  const at::Tensor rows_B = at::tensor({1, 0, 1}, at::kLong);
  for (const std::int64_t when : {std::int64_t{0}, std::int64_t{6}, 2 * kBlock, kTokens - 1}) {
    const auto selected = built.mechanism->decode_state(2),
               fresh = built.mechanism->decode_state(3);
    for (std::int64_t t = 0; t < kTokens; ++t) {
      const AttentionInput token = token_slice(in, t, 1);
      const AttentionInput token_of_rows = select_rows(token, rows_B);
      if (t == when) selected->select_rows(rows_B);
      const at::Tensor expected = built.mechanism->decode_step(*fresh, token_of_rows);
      const at::Tensor out =
          built.mechanism->decode_step(*selected, t < when ? token : token_of_rows);
      if (t >= when) {
        ASSERT_LE(max_difference(out, expected), 1e-12)
            << "selected at " << when << ", token " << t;
      }
    }
  }
}

// Rows of attention sum to 1, so a constant value comes out constant.
TEST_P(ConvexConformance, ConstantValuesComeOutConstant) {
  const Built built = build(at::kDouble);
  AttentionInput in = input(built, at::kDouble);
  in.v_BHSD = at::ones_like(in.v_BHSD);
  if (built.traits.ties_key_value) in.k_BHSD = in.v_BHSD;
  for (const Path path : {Path::kReference, Path::kFused}) {
    const at::Tensor out = run(*built.mechanism, in, path);
    EXPECT_LE(max_difference(out, at::ones_like(out)), 1e-12);
  }
}

// The kernels and LibTorch's own operations, against the reference: outputs and all gradients.
TEST_P(Conformance, ForwardAndComposedEqualReference) {
  for (const auto& [dtype, tolerance] :
       {std::pair(at::kDouble, 1e-11), std::pair(at::kFloat, 1e-4)}) {
    const Built built = build(dtype);
    const AttentionInput in = input(built, dtype);
    const at::Tensor reference = run(*built.mechanism, in, Path::kReference);
    const double scale = std::max(1.0, reference.abs().max().item<double>());
    const auto all = leaves(in, built.parameters);
    const auto d_reference = gradients(reference, all);
    for (const Path path : {Path::kSdpa, Path::kFused}) {
      const at::Tensor out = run(*built.mechanism, in, path);
      EXPECT_LE(max_difference(out, reference), tolerance * scale);
      const auto d = gradients(out, all);
      for (std::size_t i = 0; i < all.size(); ++i) {
        const double size = std::max(1.0, d_reference[i].abs().max().item<double>());
        EXPECT_LE(max_difference(d[i], d_reference[i]), tolerance * size) << "leaf " << i;
      }
    }
  }
}

// Rows of the batch do not see each other.
TEST_P(Conformance, BatchRowsAreIndependent) {
  const Built built = build(at::kDouble);
  const AttentionInput in = input(built, at::kDouble);
  const at::Tensor out = run(*built.mechanism, in, Path::kFused);
  const at::Tensor second = run(*built.mechanism, batch_slice(in, 1, 1), Path::kFused);
  EXPECT_LE(max_difference(second, out.narrow(0, 1, 1)), 1e-13);
}

// Heads do not see each other either: swapping heads swaps outputs.
TEST_P(Conformance, HeadsAreExchangeable) {
  const Built built = build(at::kDouble);
  AttentionInput in = input(built, at::kDouble);
  const at::Tensor out = run(*built.mechanism, in, Path::kFused);
  {
    at::NoGradGuard no_grad;
    for (const Parameter& parameter : built.parameters.list()) {
      at::Tensor value = parameter.value;
      value.copy_(value.flip(0).clone());
    }
    for (const Statistic& statistic : built.parameters.statistics()) {
      at::Tensor value = statistic.value;
      value.copy_(value.flip(0).clone());
    }
  }
  in.q_BHLD = in.q_BHLD.flip(1);
  in.k_BHSD = in.k_BHSD.flip(1);
  in.v_BHSD = in.v_BHSD.flip(1);
  EXPECT_LE(max_difference(run(*built.mechanism, in, Path::kFused), out.flip(1)), 1e-13);
}

// A second gradient is refused, not silently 0: kernels differentiate once.
TEST_P(Conformance, ASecondGradientIsRefused) {
  const Built built = build(at::kFloat);
  const AttentionInput in = input(built, at::kFloat);
  const at::Tensor out = run(*built.mechanism, in, Path::kFused);
  EXPECT_THROW(torch::autograd::grad({out.sum()}, {in.q_BHLD}, {}, /*retain_graph=*/true,
                                     /*create_graph=*/true),
               Error);
}

// Large logits stay finite, forward and backward.
TEST_P(Conformance, LargeLogitsStayFinite) {
  const Built built = build(at::kFloat);
  AttentionInput in = input(built, at::kFloat);
  at::NoGradGuard no_grad;
  in.q_BHLD.mul_(100);
  in.k_BHSD.mul_(100);
  if (!built.traits.unbounded) in.x_q_BLC.mul_(3000);
  for (const Path path : {Path::kReference, Path::kFused}) {
    at::AutoGradMode with_gradients(true);
    const at::Tensor out = run(*built.mechanism, in, path);
    EXPECT_TRUE(out.isfinite().all().item<bool>());
    for (const at::Tensor& d : gradients(out, leaves(in, built.parameters))) {
      EXPECT_TRUE(d.isfinite().all().item<bool>());
    }
  }
}

// Queries, keys and values in bf16, layer inputs and parameters in fp32, as in a bf16 model. Both
// paths are compared with fp64 on the same numbers, by the largest errors over several inputs.
// Unbounded block weights give large logits. Most of the error is then that of rounding the sorted
// keys, which happens on all paths, so which path has the smaller error is random.
TEST_P(Conformance, Bf16ComesWithinItsPrecision) {
  constexpr std::uint64_t kInputs = 8;
  const Built built = build(at::kFloat), wide = build(at::kDouble);
  const auto converted = [](const at::Tensor& x, at::ScalarType dtype) {
    return x.detach().to(dtype).requires_grad_(true);
  };
  const auto convert = [&](AttentionInput& to, const AttentionInput& from, at::ScalarType dtype) {
    const bool shared = from.k_BHSD.is_same(from.q_BHLD);
    const bool tied = from.v_BHSD.is_same(from.k_BHSD);
    to.q_BHLD = converted(from.q_BHLD, dtype);
    to.k_BHSD = shared ? to.q_BHLD : converted(from.k_BHSD, dtype);
    to.v_BHSD = tied ? to.k_BHSD : converted(from.v_BHSD, dtype);
  };
  constexpr double kUnit = 0x1p-8;  // half the distance of bf16 numbers, relative
  const double growth = built.traits.unbounded ? 2 : 1;
  const auto error = [](const at::Tensor& x, const at::Tensor& from) {
    return max_difference(x, from) / std::max(1e-3, from.abs().max().item<double>());
  };
  // Errors of the output, then of each leaf's gradient.
  std::vector<double> reference_errors, composed_errors, forward_errors;
  for (std::uint64_t seed = 1; seed <= kInputs; ++seed) {
    AttentionInput in = input(built, at::kFloat, seed);
    convert(in, in, at::kBFloat16);
    AttentionInput wide_in = in;
    convert(wide_in, in, at::kDouble);
    wide_in.x_q_BLC = wide_in.x_kv_BSC = converted(in.x_q_BLC, at::kDouble);
    const at::Tensor exact = run(*wide.mechanism, wide_in, Path::kReference);
    const auto d_exact = gradients(exact, leaves(wide_in, wide.parameters));
    for (const auto& [path, errors] :
         {std::pair(Path::kReference, &reference_errors), std::pair(Path::kSdpa, &composed_errors),
          std::pair(Path::kFused, &forward_errors)}) {
      const at::Tensor out = run(*built.mechanism, in, path);
      EXPECT_EQ(out.scalar_type(), at::kBFloat16);
      const auto all = leaves(in, built.parameters);
      const auto d = gradients(out, all);
      std::vector<double>& largest = *errors;
      largest.resize(1 + all.size());
      largest[0] = std::max(largest[0], error(out, exact));
      for (std::size_t i = 0; i < all.size(); ++i) {
        EXPECT_EQ(d[i].scalar_type(), all[i].scalar_type());
        largest[i + 1] = std::max(largest[i + 1], error(d[i], d_exact[i]));
      }
    }
    if (seed > 1) continue;  // absolute bounds, for one input
    EXPECT_LE(reference_errors[0], 8 * kUnit);
    for (std::size_t i = 1; i < reference_errors.size(); ++i) {
      EXPECT_LE(reference_errors[i], 16 * growth * kUnit) << "leaf " << i - 1;
    }
  }
  for (const auto& errors : {composed_errors, forward_errors}) {
    EXPECT_LE(errors[0], 2 * reference_errors[0] + kUnit);
    for (std::size_t i = 1; i < errors.size(); ++i) {
      EXPECT_LE(errors[i], 2 * reference_errors[i] + 2 * growth * kUnit) << "leaf " << i - 1;
    }
  }
}

// L shorter than a block, and L of one token.
TEST_P(Conformance, ShortSequences) {
  const Built built = build(at::kDouble);
  for (const std::int64_t tokens : {1, 3, 4, 5}) {
    const AttentionInput in = random_input(tokens, at::kDouble, 4, built.traits);
    const at::Tensor reference = run(*built.mechanism, in, Path::kReference);
    ASSERT_EQ(reference.size(2), tokens);
    EXPECT_LE(max_difference(run(*built.mechanism, in, Path::kFused), reference),
              1e-12 * std::max(1.0, reference.abs().max().item<double>()));
  }
}

TEST_P(Conformance, WorkGrowsWithLength) {
  const Built built = build(at::kFloat);
  // Clusters of a fixed size have the same work for any number of tokens.
  const double growth = built.traits.skips_queries ? 1 : 1.9;
  EXPECT_GT(built.mechanism->forward_flops(64), growth * built.mechanism->forward_flops(32));
}

}  // namespace
}  // namespace birkhoff::test
