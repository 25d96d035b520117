// Properties that every model must have, whatever its attention: causality, decoding, packed
// documents.
//
// Legend: B batch, T tokens, V vocabulary.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "cluster/base/error.h"
#include "model_fixture.h"
#include "models/transformer/forward_record.h"
#include "tests/attention/mechanisms/mechanism_cases.h"

namespace birkhoff {
namespace {

constexpr std::int64_t kTokens = 16;  // four blocks

std::string attention(const std::string& mechanism) {
  return "attention { group { mechanism { " + mechanism + " } } }";
}

struct Mode {
  std::string name, mechanism;
};
void PrintTo(const Mode& mode, std::ostream* out) { *out << mode.name; }

class CausalMode : public ::testing::TestWithParam<Mode> {
 protected:
  static TestModel make(const std::string& precision) {
    TestModel model =
        make_test_model(attention(GetParam().mechanism), {"train.precision=" + precision});
    enlarge_parameters(*model.model);
    return model;
  }
};

// Every mechanism in every variant that is causal.
std::vector<Mode> causal_modes() {
  std::vector<Mode> modes;
  for (const auto& each :
       test::cases_where([](const test::MechanismCase&, const MechanismTraits& traits) {
         return traits.causal;
       })) {
    modes.push_back({each.name, each.config.ShortDebugString()});
  }
  return modes;
}

INSTANTIATE_TEST_SUITE_P(Models, CausalMode, ::testing::ValuesIn(causal_modes()),
                         [](const auto& mode) { return mode.param.name; });

Batch with_inputs(const at::Tensor& tokens_BT) {
  Batch batch;
  batch.fields["inputs"] = tokens_BT;
  batch.sample_ids_B = at::arange(tokens_BT.size(0), at::kLong);
  return batch;
}

struct Perturbed {
  std::int64_t t;
  at::Tensor before_BTV, after_BTV;
};

// Logits after all tokens from t on have changed, for every t that has a token before it.
std::vector<Perturbed> perturb_futures(const TestModel& model) {
  const at::Tensor tokens_BT = test_ids(2, kTokens, 11);
  const at::Tensor others_BT = (tokens_BT + 1 + test_ids(2, kTokens, 12).remainder(10))
                                   .remainder(kVocabulary);  // each differs
  const at::Tensor before_BTV = model->logits(with_inputs(tokens_BT), {}).detach();
  std::vector<Perturbed> result;
  for (std::int64_t t = 1; t < kTokens; ++t) {
    const at::Tensor changed_BT =
        at::cat({tokens_BT.narrow(1, 0, t), others_BT.narrow(1, t, kTokens - t)}, 1);
    result.push_back({t, before_BTV, model->logits(with_inputs(changed_BT), {}).detach()});
  }
  return result;
}

TEST_P(CausalMode, TheFutureDoesNotReachThePast) {
  for (const char* const precision : {"fp64", "fp32"}) {
    const TestModel model = make(precision);
    EXPECT_THAT(model->warnings(), ::testing::IsEmpty());
    for (const auto& [t, before_BTV, after_BTV] : perturb_futures(model)) {
      EXPECT_TRUE(at::equal(before_BTV.narrow(1, 0, t), after_BTV.narrow(1, 0, t)))
          << precision << " t = " << t;
      EXPECT_FALSE(at::equal(before_BTV.select(1, t), after_BTV.select(1, t)));
    }
  }
}

// The causality test must fail for a balance that is known to leak.
TEST(Models, PaperMaskedFailsTheTestOfCausality) {
  const TestModel model = make_test_model(
      attention("sinkhorn { block: 4 causal_balance: paper_masked iterations: 5 }"));
  enlarge_parameters(*model.model);
  double leak = 0;
  for (const auto& [t, before_BTV, after_BTV] : perturb_futures(model)) {
    leak =
        std::max(leak, greatest_difference(before_BTV.narrow(1, 0, t), after_BTV.narrow(1, 0, t)));
  }
  EXPECT_GT(leak, 1e-3);
  ASSERT_EQ(model->warnings().size(), 2U);  // one per layer
  EXPECT_THAT(model->warnings()[1],
              ::testing::HasSubstr("blocks.1.attention.groups.0: paper_masked leaks"));
}

TEST_P(CausalMode, DecodingEqualsTheWholeSequence) {
  for (const auto& [precision, tolerance] : {std::pair{"fp64", 1e-12}, std::pair{"fp32", 1e-5}}) {
    const TestModel model = make(precision);
    const at::Tensor tokens_BT = test_ids(3, kTokens, 13);
    const auto cache = model->decode_cache(3);
    std::vector<at::Tensor> steps;
    for (std::int64_t t = 0; t < kTokens; ++t) {
      steps.push_back(model->decode_step(*cache, tokens_BT.select(1, t)));
    }
    // The shorter sequence ends inside a block.
    for (const std::int64_t tokens : {kTokens, kTokens - 2}) {
      const at::Tensor whole_BTV = model->logits(with_inputs(tokens_BT.narrow(1, 0, tokens)), {});
      EXPECT_LE(greatest_difference(at::stack(steps, 1).narrow(1, 0, tokens), whole_BTV), tolerance)
          << precision << ", " << tokens << " tokens";
    }
    EXPECT_THROW(model->decode_step(*cache, tokens_BT.select(1, 0)), Error);
  }
}

TEST_P(CausalMode, SequencesOfACacheCanBeSelected) {
  const TestModel model = make("fp64");
  const at::Tensor tokens_BT = test_ids(3, kTokens, 13);
  const at::Tensor rows_B = at::tensor({2, 0, 2, 1}, at::kLong);
  const at::Tensor selected_BT = tokens_BT.index_select(0, rows_B);
  const auto cache = model->decode_cache(3), fresh = model->decode_cache(4);
  for (std::int64_t t = 0; t < kTokens; ++t) {
    if (t == 6) cache->select_rows(rows_B);
    const at::Tensor expected = model->decode_step(*fresh, selected_BT.select(1, t));
    const at::Tensor out =
        model->decode_step(*cache, (t < 6 ? tokens_BT : selected_BT).select(1, t));
    if (t >= 6) {
      ASSERT_LE(greatest_difference(out, expected), 1e-12) << "token " << t;
    }
  }
}

// A control model differs from the other model only in its mechanism.
TEST(Models, UniformStartsWhereOtherModesDoButHasNoSortNet) {
  const TestModel uniform =
      make_test_model(attention("sinkhorn { block: 4 causal_balance: uniform }"));
  const TestModel prefix =
      make_test_model(attention("sinkhorn { block: 4 causal_balance: prefix }"));
  std::vector<std::string> only_prefix;
  for (const Parameter& parameter : prefix->parameters().list()) {
    const at::Tensor twin = parameter_of(*uniform.model, parameter.name);
    if (!twin.defined()) {
      only_prefix.push_back(parameter.name);
    } else {
      EXPECT_TRUE(at::equal(parameter.value, twin)) << parameter.name;
    }
  }
  EXPECT_THAT(only_prefix, ::testing::Each(::testing::HasSubstr(".sort_net.")));
  EXPECT_EQ(only_prefix.size(), 4U);  // one weight and one bias per layer
  EXPECT_EQ(uniform->parameters().list().size() + 4, prefix->parameters().list().size());
}

// Tensor-parallel ranks do without, and tensor_parallel_test compares their gradients.
TEST(Models, LayersTakeTheFirstTokensOfSortNetsForGradients) {
  const TestModel model = make_test_model(
      "attention { group { heads: 1 mechanism { sinkhorn { block: 4 } } }"
      " group { heads: 1 mechanism { sinkhorn { block: 8 pooling: mean } } } }");
  for (const bool differentiated : {true, false}) {
    const at::AutoGradMode mode(differentiated);
    const ForwardRecord record;
    model->logits(with_inputs(test_ids(2, kTokens, 3)), {});
    ASSERT_EQ(record.attentions.size(), 4u);  // two groups of two layers
    for (std::size_t i = 0; i < 4; ++i) {
      const at::Tensor& first_BNC = record.attentions[i].in.first_x_BNC;
      ASSERT_EQ(first_BNC.defined(), differentiated && i % 2 == 0);
      if (!first_BNC.defined()) continue;
      EXPECT_TRUE(at::equal(first_BNC, record.attentions[i].in.x_q_BLC.slice(1, 0, kTokens, 4)));
    }
  }
}

// The documents meet at a block boundary. A learned SortNet numbers source blocks from the start of
// the sequence; `attention` and `uniform` do not, so the position of a document does not matter.
TEST(Models, PackedDocumentsEqualTheDocumentsAlone) {
  const at::Tensor tokens_BT = test_ids(2, kTokens, 14);
  for (const char* const mechanism :
       {"block_local { block: 4 look_back: 0 }", "block_local { block: 4 look_back: 1 }",
        "sinkhorn { block: 4 sort_net: attention }",
        "sinkhorn { block: 4 sort_net: attention pooling: sum }",
        "sinkhorn { block: 4 sort_net: attention causal_balance: cumulative }",
        "sinkhorn { block: 4 causal_balance: uniform }"}) {
    const TestModel model = make_test_model(attention(mechanism));
    enlarge_parameters(*model.model);
    for (const std::int64_t border : {4, 8}) {
      const std::int64_t rest = kTokens - border;
      Batch packed = with_inputs(tokens_BT);
      const at::Tensor flowing_BTV = model->logits(packed, {});
      packed.fields["segments"] =
          at::cat({at::zeros({2, border}, at::kInt), at::ones({2, rest}, at::kInt)}, 1);
      packed.fields["positions"] =
          at::cat({at::arange(border, at::kLong), at::arange(rest, at::kLong)})
              .expand({2, kTokens});
      const at::Tensor packed_BTV = model->logits(packed, {});
      const at::Tensor alone_BTV =
          at::cat({model->logits(with_inputs(tokens_BT.narrow(1, 0, border)), {}),
                   model->logits(with_inputs(tokens_BT.narrow(1, border, rest)), {})},
                  1);
      EXPECT_LE(greatest_difference(packed_BTV, alone_BTV), 1e-12) << mechanism;
      EXPECT_GT(greatest_difference(packed_BTV, flowing_BTV), 1e-3) << mechanism;
    }
  }
}

}  // namespace
}  // namespace birkhoff
