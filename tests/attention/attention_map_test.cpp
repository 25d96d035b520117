// The attention map of every mechanism in the schema. Legend: L queries, S keys.
#include "attention/attention_map.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/attention/mechanisms/mechanism_cases.h"

namespace birkhoff::test {
namespace {

class AttentionMap : public testing::TestWithParam<MechanismCase> {
 protected:
  Built built_{GetParam().config, GetParam().causal, at::kDouble};
  AttentionInput in_ = random_input(kTokens, at::kDouble, 3, built_.traits);
};

// A mechanism whose output is not linear in its values would need a map of its own.
TEST_P(AttentionMap, TimesValuesIsTheOutput) {
  const at::Tensor map_BHLS = attention_map(*built_.mechanism, in_);
  AttentionInput without = in_;
  without.v_BHSD = at::zeros_like(in_.v_BHSD);
  AttentionInput with = in_;  // values of their own, even if the layer would tie them to keys
  with.v_BHSD = random_tensor(in_.v_BHSD.sizes(), at::kDouble, 4);
  const at::Tensor from_values_BHLD = run(*built_.mechanism, with, Path::kReference) -
                                      run(*built_.mechanism, without, Path::kReference);
  EXPECT_LE(max_difference(at::matmul(map_BHLS, with.v_BHSD), from_values_BHLD), 1e-12);
  EXPECT_FALSE(map_BHLS.requires_grad());
}

TEST_P(AttentionMap, WeightsAreWhereTheMechanismSeesKeys) {
  const at::Tensor map_BHLS = attention_map(*built_.mechanism, in_);
  const at::Tensor seen_LS = built_.mechanism->visible_keys(kTokens, kTokens);
  EXPECT_LE(map_BHLS.masked_fill(seen_LS, 0).abs().max().item<double>(), 1e-15);
  EXPECT_GE(map_BHLS.min().item<double>(), -1e-15);
  if (built_.traits.convex) {
    EXPECT_LE((map_BHLS.sum(3) - 1).abs().max().item<double>(), 1e-12);
  }
}

// A weight goes from a query to a key of a cluster that both are in, or of a block whose weight is
// above 0 for the query's block.
TEST_P(AttentionMap, ChoicesExplainTheWeights) {
  const std::vector<Choice> choices = built_.mechanism->choices(in_);
  for (const Choice& choice : choices) {
    EXPECT_GE(choice.matrix_BHRC.min().item<double>(), 0) << choice.name;
    EXPECT_FALSE(choice.matrix_BHRC.requires_grad());
  }
  if (choices.empty() || GetParam().config.has_sinkhorn_mixture()) return;
  at::Tensor reached_BHLS;
  if (choices[0].balanced) {
    const at::Tensor blocks = at::arange(kTokens).div(kBlock, "floor");
    const at::Tensor open_BHNN = at::logical_or(
        choices[0].matrix_BHRC > 0, at::eye(choices[0].matrix_BHRC.size(2)).to(at::kBool));
    reached_BHLS = open_BHNN.index_select(2, blocks).index_select(3, blocks);
  } else {
    const auto member = [](const Choice& choice) { return choice.matrix_BHRC.to(at::kDouble); };
    reached_BHLS = at::matmul(member(choices.front()), member(choices.back()).transpose(2, 3)) > 0;
  }
  const at::Tensor map_BHLS = attention_map(*built_.mechanism, in_);
  EXPECT_LE(map_BHLS.masked_fill(reached_BHLS, 0).abs().max().item<double>(), 1e-15);
}

TEST_P(AttentionMap, SortMatricesOfEncodersAreBalanced) {
  if (!GetParam().config.has_sinkhorn() || GetParam().causal) return;
  const configs::SinkhornAttention& config = GetParam().config.sinkhorn();
  if (config.iterations() < 5 || config.top_m() > 0) return;
  const at::Tensor sort_BHNN = built_.mechanism->choices(in_)[0].matrix_BHRC;
  EXPECT_LE((sort_BHNN.sum(3) - 1).abs().max().item<double>(), 1e-12);
  EXPECT_LE((sort_BHNN.sum(2) - 1).abs().max().item<double>(), 0.5);
}

INSTANTIATE_TEST_SUITE_P(Mechanisms, AttentionMap, testing::ValuesIn(all_cases()), name_of);

TEST(AttentionMapOf, RoundedInputsIsInFp32) {
  configs::Mechanism config;
  config.mutable_dense();
  const Built built(config, /*causal=*/true, at::kFloat);
  AttentionInput in = random_input(kTokens, at::kFloat, 3, built.traits);
  for (at::Tensor* x : {&in.q_BHLD, &in.k_BHSD, &in.v_BHSD}) *x = x->detach().to(at::kBFloat16);
  const at::Tensor map_BHLS = attention_map(*built.mechanism, in);
  EXPECT_EQ(map_BHLS.scalar_type(), at::kFloat);
  EXPECT_LE((map_BHLS.sum(3) - 1).abs().max().item<double>(), 1e-6);
}

}  // namespace
}  // namespace birkhoff::test
