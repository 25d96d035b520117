// Cross-attention: queries of one sequence, keys and values of another. Legend: B batch, H heads, L
// queries, S keys, D head dim.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "cluster/base/error.h"
#include "tests/attention/mechanisms/mechanism_cases.h"

namespace birkhoff::test {
namespace {

constexpr std::int64_t kCrossQueries = 9, kCrossKeys = 14;

bool supports_cross_attention(const MechanismCase&, const MechanismTraits& traits) {
  return traits.supports_cross_attention;
}
bool supports_sets(const MechanismCase&, const MechanismTraits& traits) {
  return traits.supports_sets;
}
bool stays(const MechanismCase&, const MechanismTraits& traits) {
  return !traits.supports_cross_attention && !traits.supports_sets;
}

class Cross : public ::testing::TestWithParam<MechanismCase> {
 protected:
  // Queries of one input, keys and values of another.
  AttentionInput cross_input(std::int64_t num_queries) const {
    AttentionInput in = random_input(kCrossKeys, at::kDouble, 1, built_.traits);
    const AttentionInput queries = random_input(num_queries, at::kDouble, 2);
    in.q_BHLD = queries.q_BHLD;
    in.x_q_BLC = queries.x_q_BLC;
    return in;
  }
  static AttentionInput padded(AttentionInput in) {
    in.key_lengths_B = at::tensor({kCrossKeys, std::int64_t{5}}, at::kLong);
    return in;
  }
  at::Tensor run(const AttentionInput& in, Path path) const {
    return test::run(*built_.mechanism, in, path);
  }
  void expect_paths_equal_the_reference(const AttentionInput& in) const {
    const auto all = leaves(in, built_.parameters);
    const at::Tensor expected = run(in, Path::kReference);
    ASSERT_EQ(expected.sizes(), in.q_BHLD.sizes());
    const auto expected_gradients = gradients(expected, all);
    for (const Path path : {Path::kSdpa, Path::kFused}) {
      const at::Tensor out = run(in, path);
      EXPECT_LE(max_difference(out, expected), 1e-12) << in.q_BHLD.size(2);
      const auto found = gradients(out, all);
      for (std::size_t i = 0; i < all.size(); ++i) {
        EXPECT_LE(max_difference(found[i], expected_gradients[i]), 1e-12) << in.q_BHLD.size(2) << i;
      }
    }
  }

  Built built_{GetParam().config, GetParam().causal, at::kDouble};
};
class CrossConformance : public Cross {};
class SelfConformance : public Cross {};
class SetConformance : public Cross {};
INSTANTIATE_TEST_SUITE_P(All, CrossConformance,
                         ::testing::ValuesIn(cases_where(supports_cross_attention)), name_of);
INSTANTIATE_TEST_SUITE_P(All, SelfConformance, ::testing::ValuesIn(cases_where(stays)), name_of);
INSTANTIATE_TEST_SUITE_P(All, SetConformance, ::testing::ValuesIn(cases_where(supports_sets)),
                         name_of);

TEST_P(CrossConformance, AllPathsEqualTheReference) {
  for (const std::int64_t num_queries :
       {std::int64_t{1}, kCrossQueries, kCrossKeys, kCrossKeys + 3}) {
    const AttentionInput unpadded = cross_input(num_queries);
    for (const AttentionInput& in : {unpadded, padded(unpadded)}) {
      expect_paths_equal_the_reference(in);
    }
  }
}

TEST_P(SetConformance, AllPathsEqualTheReference) {
  for (const std::int64_t num_queries :
       {std::int64_t{1}, kCrossQueries, kCrossKeys, kCrossKeys + 3}) {
    expect_paths_equal_the_reference(cross_input(num_queries));
  }
}

TEST_P(SetConformance, OrdersHaveNoMeaning) {
  const at::NoGradGuard no_grad;
  const AttentionInput in = cross_input(kCrossQueries);
  const at::Tensor queries_L = (at::arange(kCrossQueries) * 4 + 2).remainder(kCrossQueries),
                   keys_S = (at::arange(kCrossKeys) * 5 + 3).remainder(kCrossKeys);
  AttentionInput permuted = in;
  permuted.q_BHLD = in.q_BHLD.index_select(2, queries_L);
  permuted.x_q_BLC = in.x_q_BLC.index_select(1, queries_L);
  permuted.k_BHSD = in.k_BHSD.index_select(2, keys_S);
  permuted.v_BHSD = in.v_BHSD.index_select(2, keys_S);
  permuted.x_kv_BSC = in.x_kv_BSC.index_select(1, keys_S);
  EXPECT_LE(
      max_difference(run(permuted, Path::kFused), run(in, Path::kFused).index_select(2, queries_L)),
      1e-12);
}

TEST_P(SetConformance, OneQueryWeighsKeysAlikeIfTheyAreBalanced) {
  const at::NoGradGuard no_grad;
  const AttentionInput in = cross_input(1);
  const double difference =
      max_difference(run(in, Path::kFused), in.v_BHSD.mean(2, /*keepdim=*/true));
  if (built_.traits.balances_keys) {
    EXPECT_LE(difference, 1e-12);
  } else {
    EXPECT_GT(difference, 1e-3);
  }
}

// Decoding relies on it.
TEST_P(CrossConformance, QueriesMayComeOneAtATime) {
  const at::NoGradGuard no_grad;
  const AttentionInput in = padded(cross_input(kCrossQueries));
  const at::Tensor all = run(in, Path::kFused);
  for (std::int64_t i = 0; i < kCrossQueries; ++i) {
    AttentionInput one = in;
    one.q_BHLD = in.q_BHLD.narrow(2, i, 1);
    one.x_q_BLC = in.x_q_BLC.narrow(1, i, 1);
    EXPECT_LE(max_difference(run(one, Path::kFused), all.narrow(2, i, 1)), 1e-12) << i;
  }
}

// Keys, values and inputs of padding change no bit, on any path.
TEST_P(CrossConformance, PaddingIsUnseen) {
  const at::NoGradGuard no_grad;
  const AttentionInput in = padded(cross_input(kCrossQueries));
  AttentionInput changed = in;
  changed.k_BHSD = in.k_BHSD.clone();
  changed.v_BHSD = built_.traits.ties_key_value ? changed.k_BHSD : in.v_BHSD.clone();
  changed.x_kv_BSC = in.x_kv_BSC.clone();
  for (const at::Tensor& x : {changed.k_BHSD, changed.v_BHSD}) x.slice(2, 5).fill_(3);
  changed.x_kv_BSC.slice(1, 5).fill_(3);
  for (const Path path : {Path::kReference, Path::kSdpa, Path::kFused}) {
    const at::Tensor out = run(in, path), changed_out = run(changed, path);
    EXPECT_GT(max_difference(out[0], changed_out[0]), 1e-3);  // this sample has no padding
    EXPECT_TRUE(at::equal(out[1], changed_out[1]));
  }
}

TEST_P(CrossConformance, GradientsReachVisibleKeysAlone) {
  const AttentionInput in = cross_input(kCrossQueries);
  const at::Tensor visible_LS = built_.mechanism->visible_keys(kCrossQueries, kCrossKeys);
  const at::Tensor out = run(in, Path::kFused);
  for (std::int64_t i = 0; i < kCrossQueries; ++i) {
    const at::Tensor d_v = gradients(out.select(2, i), {in.v_BHSD})[0];
    const at::Tensor reached_S = d_v.ne(0).any(3).any(1).any(0);
    if (built_.traits.selects) {
      EXPECT_FALSE(at::logical_and(reached_S, visible_LS[i].logical_not()).any().item<bool>());
      EXPECT_TRUE(reached_S.any().item<bool>());
    } else {
      EXPECT_TRUE(at::equal(reached_S, visible_LS[i])) << i;
    }
  }
}

// Mechanisms of one sequence refuse two lengths; they must not align them in some way.
TEST_P(SelfConformance, RefusesTwoLengths) {
  for (const AttentionInput& in :
       {cross_input(kCrossQueries), padded(cross_input(kCrossQueries))}) {
    for (const Path path : {Path::kReference, Path::kSdpa, Path::kFused}) {
      EXPECT_THROW(run(in, path), Error);
    }
  }
}

}  // namespace
}  // namespace birkhoff::test
