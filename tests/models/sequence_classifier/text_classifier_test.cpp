// Legend: B batch, T tokens, K classes.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>

#include "cluster/base/error.h"
#include "configs/schema/config.pb.h"
#include "tests/attention/mechanisms/mechanism_cases.h"
#include "tests/models/model_fixture.h"

namespace birkhoff {
namespace {

using ::testing::HasSubstr;

constexpr std::int64_t kTokens = 16;  // four blocks
const std::vector<std::int64_t> kLengths = {16, 1, 7, 12};

Batch make_texts(const std::vector<std::int64_t>& lengths = kLengths,
                 std::int64_t tokens = kTokens) {
  const auto batch = static_cast<std::int64_t>(lengths.size());
  Batch result;
  result.fields["inputs"] = test_ids(batch, tokens, 21);
  result.fields["lengths"] = at::tensor(lengths, at::kLong);
  result.fields["labels"] = at::arange(batch, at::kLong).remainder(3);
  result.sample_ids_B = at::arange(batch, at::kLong) + 100;
  return result;
}

SequenceClassifier& classifier(const TestModel& model) {
  return dynamic_cast<SequenceClassifier&>(*model.model);
}

at::Tensor log_probabilities(const TestModel& model, const Batch& batch) {
  return classifier(model).log_probabilities(batch);
}

struct Mode {
  std::string name, mechanism;
};
void PrintTo(const Mode& mode, std::ostream* out) { *out << mode.name; }

// Every mechanism in every variant, as it is used in encoders.
std::vector<Mode> encoder_modes() {
  std::vector<Mode> modes;
  for (const auto& each : test::all_cases()) {
    if (!each.causal) modes.push_back({each.name, each.config.ShortDebugString()});
  }
  return modes;
}

class Encoder : public ::testing::TestWithParam<Mode> {
 protected:
  static TestModel make(const std::vector<std::string>& settings = {}) {
    TestModel model = make_test_classifier(
        "attention { group { mechanism { " + GetParam().mechanism + " } } }", settings);
    enlarge_parameters(*model.model);
    return model;
  }
};

INSTANTIATE_TEST_SUITE_P(Models, Encoder, ::testing::ValuesIn(encoder_modes()),
                         [](const auto& mode) { return mode.param.name; });

TEST_P(Encoder, PaddingAndOtherTextsDoNotMatter) {
  const TestModel model = make();
  const Batch batch = make_texts();
  const at::Tensor all_BK = log_probabilities(model, batch);
  Batch other_padding = batch;
  const at::Tensor is_padding_BT =
      at::arange(kTokens).unsqueeze(0).ge(batch.at("lengths").unsqueeze(1));
  other_padding.fields["inputs"] =
      at::where(is_padding_BT, (batch.at("inputs") + 5).remainder(kVocabulary), batch.at("inputs"));
  EXPECT_LT(greatest_difference(log_probabilities(model, other_padding), all_BK), 1e-12);
  for (std::int64_t i = 0; i < batch.size(); ++i) {
    Batch alone = batch.narrow(i, i + 1);
    EXPECT_LT(greatest_difference(log_probabilities(model, alone)[0], all_BK[i]), 1e-12)
        << "text " << i;
    // Without its padding.
    alone.fields["inputs"] = alone.at("inputs").narrow(1, 0, kLengths[static_cast<std::size_t>(i)]);
    EXPECT_LT(greatest_difference(log_probabilities(model, alone)[0], all_BK[i]), 1e-12)
        << "text " << i;
  }
}

TEST_P(Encoder, EveryTokenMatters) {
  const TestModel model = make();
  const Batch batch = make_texts({kTokens});
  const at::Tensor before = log_probabilities(model, batch);
  for (std::int64_t t = 0; t < kTokens; ++t) {
    Batch changed = batch;
    changed.fields["inputs"] = batch.at("inputs").clone();
    changed.fields["inputs"].narrow(1, t, 1).add_(3).remainder_(kVocabulary);
    EXPECT_GT(greatest_difference(log_probabilities(model, changed), before), 1e-9)
        << "token " << t;
  }
}

TEST_P(Encoder, PaddingGetsNoGradient) {
  const TestModel model = make();
  Batch batch = make_texts({5, 9});
  constexpr std::int64_t kPad = kVocabulary - 1;
  // The texts hold every other id.
  at::Tensor& inputs_BT = batch.fields["inputs"];
  inputs_BT.copy_(at::arange(kTokens)
                      .unsqueeze(0)
                      .add(at::tensor({0, 5}, at::kLong).unsqueeze(1))
                      .remainder(kPad));
  inputs_BT[0].narrow(0, 5, kTokens - 5).fill_(kPad);
  inputs_BT[1].narrow(0, 9, kTokens - 9).fill_(kPad);
  classifier(model).loss_sums(batch, make_noise(batch)).loss.backward();
  const at::Tensor rows = parameter_of(*model.model, "embedding.weight").grad().abs().amax(1);
  EXPECT_EQ(rows[kPad].item<double>(), 0);
  EXPECT_GT(rows.narrow(0, 0, kPad).min().item<double>(), 0);
}

TEST_P(Encoder, RecomputationGivesTheSameBits) {
  const Batch batch = make_texts();
  const auto gradients = [&](const std::string& recompute) {
    const TestModel model = make({"train.recompute=" + recompute, "model.dropout.residual=0.2"});
    classifier(model).loss_sums(batch, make_noise(batch)).loss.backward();
    return parameter_of(*model.model, "embedding.weight").grad().clone();
  };
  EXPECT_TRUE(gradients("true").equal(gradients("false")));
}

TEST(TextClassifier, LossesCountsAndAccuracy) {
  const TestModel model = make_test_classifier("");
  enlarge_parameters(*model.model);
  const Batch batch = make_texts();
  const at::Tensor log_p_BK = log_probabilities(model, batch);
  const LossSums sums = classifier(model).loss_sums(batch, std::nullopt);
  double nats = 0, correct = 0;
  for (std::int64_t i = 0; i < batch.size(); ++i) {
    const auto label = batch.at("labels")[i].item<std::int64_t>();
    nats -= log_p_BK[i][label].item<double>();
    correct += static_cast<double>(log_p_BK[i].argmax().item<std::int64_t>() == label);
  }
  EXPECT_NEAR(sums.nats.item<double>(), nats, 1e-12);
  EXPECT_NEAR(sums.loss.item<double>(), nats, 1e-12);
  EXPECT_EQ(sums.count.item<double>(), 4);
  EXPECT_EQ(sums.tokens.item<double>(), 16 + 1 + 7 + 12);
  ASSERT_EQ(sums.named.size(), 1U);
  EXPECT_EQ(sums.named[0].first, "accuracy");
  EXPECT_EQ(sums.named[0].second.item<double>(), correct);
  ASSERT_EQ(model.model->figures().size(), 1U);
  EXPECT_EQ(model.model->figures()[0].sum, "accuracy");
  EXPECT_LT(greatest_difference(log_p_BK.exp().sum(1), at::ones({4}, at::kDouble)), 1e-12);
}

// A text counts as one target, so its commitment loss is the mean over its tokens. If all tokens of
// a text are equal and there are no positions, its length changes nothing.
TEST(TextClassifier, CommitmentIsThatOfAMeanToken) {
  constexpr double kCommitment = 0.5;
  const TestModel model = make_test_classifier(
      "positions: no_positions attention { group { mechanism { routing { clusters: 1 window: 16 "
      "commitment: 0.5 } } } }");
  enlarge_parameters(*model.model);
  const auto loss_of = [&](const std::vector<std::int64_t>& lengths) {
    Batch batch = make_texts(lengths);
    batch.fields["inputs"].fill_(4);
    batch.fields["labels"].fill_(1);
    const LossSums sums = classifier(model).loss_sums(batch, make_noise(batch));
    double auxiliary = 0;
    for (const auto& [name, value] : sums.named) {
      if (name.ends_with(".auxiliary_loss")) auxiliary += value.item<double>();
    }
    EXPECT_NEAR(sums.loss.item<double>(), sums.nats.item<double>() + auxiliary, 1e-12);
    const at::Tensor gradient =
        torch::autograd::grad({sums.loss}, {parameter_of(*model.model, "embedding.weight")})[0];
    return std::pair(auxiliary, gradient);
  };
  const auto [one, d_one] = loss_of({1});
  EXPECT_GT(one, 0);
  // Two unit vectors differ by at most 2, in each of two layers.
  EXPECT_LE(one, 2 * kCommitment * 4 / 4);
  for (const std::int64_t length : {7, 16}) {
    const auto [several, d_several] = loss_of({length});
    EXPECT_NEAR(several, one, 1e-12) << length;
    EXPECT_LT(greatest_difference(d_several, d_one), 1e-12) << length;
  }
  const auto [both, d_both] = loss_of({7, 16});
  EXPECT_NEAR(both, 2 * one, 1e-12);
  EXPECT_LT(greatest_difference(d_both, 2 * d_one), 1e-12);
}

// Without layers' mixing (zero output projections) the outputs are those of single tokens.
TEST(TextClassifier, PoolsTheMeanOrTheFirstToken) {
  const auto make = [](const std::string& pooling) {
    TestModel model =
        make_test_classifier("positions: no_positions", {"task.classification.pooling=" + pooling});
    enlarge_parameters(*model.model);
    for (const Parameter& p : model.model->parameters().list()) {
      if (p.name.ends_with("attention.output.weight")) p.value.detach().zero_();
    }
    return model;
  };
  const Batch batch = make_texts({3, 5});
  Batch first = batch;
  first.fields["lengths"] = at::ones({2}, at::kLong);
  const TestModel mean = make("mean"), of_first = make("first");
  EXPECT_LT(greatest_difference(log_probabilities(of_first, batch), log_probabilities(mean, first)),
            1e-12);
  // Repeating the whole text leaves its mean as it is, repeating one token does not.
  Batch text, twice, longer;
  text.fields["inputs"] = at::tensor({1, 2, 3}, at::kLong).unsqueeze(0);
  twice.fields["inputs"] = at::tensor({1, 2, 3, 3, 1, 2}, at::kLong).unsqueeze(0);
  longer.fields["inputs"] = at::tensor({1, 2, 3, 3}, at::kLong).unsqueeze(0);
  for (Batch* each : {&text, &twice, &longer}) {
    each->fields["lengths"] = at::full({1}, each->at("inputs").size(1), at::kLong);
    each->sample_ids_B = at::zeros({1}, at::kLong);
  }
  const at::Tensor once = log_probabilities(mean, text);
  EXPECT_LT(greatest_difference(log_probabilities(mean, twice), once), 1e-12);
  EXPECT_GT(greatest_difference(log_probabilities(mean, longer), once), 1e-3);
}

// The maximum of each channel over the text, without its padding; equal maxima share the gradient.
TEST(TextClassifier, PoolsTheMaximum) {
  const TestModel model =
      make_test_classifier("bias: true", {"task.classification.pooling=max", "model.layers=1"});
  enlarge_parameters(*model.model);
  // The last norm's outputs, through which one looks by a linear output layer: negative values of
  // padding must not win, so all outputs are made negative.
  parameter_of(*model.model, "final_norm.bias").detach().fill_(-50);
  const Batch batch = make_texts();
  const at::Tensor all_BK = log_probabilities(model, batch);
  for (std::int64_t i = 0; i < batch.size(); ++i) {
    Batch alone = batch.narrow(i, i + 1);
    alone.fields["inputs"] = alone.at("inputs").narrow(1, 0, kLengths[static_cast<std::size_t>(i)]);
    EXPECT_LT(greatest_difference(log_probabilities(model, alone)[0], all_BK[i]), 1e-12) << i;
  }
  // Copies of one token: whichever has the maximum, its gradient is that of the text of one.
  const TestModel plain = make_test_classifier(
      "positions: no_positions", {"task.classification.pooling=max", "model.layers=1"});
  enlarge_parameters(*plain.model);
  const auto gradient = [&](std::int64_t length) {
    Batch text;
    text.fields["inputs"] = at::full({1, length}, 4, at::kLong);
    text.fields["lengths"] = at::full({1}, length, at::kLong);
    text.fields["labels"] = at::ones({1}, at::kLong);
    text.sample_ids_B = at::zeros({1}, at::kLong);
    const LossSums sums = classifier(plain).loss_sums(text, std::nullopt);
    return torch::autograd::grad({sums.loss}, {parameter_of(*plain.model, "embedding.weight")})[0];
  };
  EXPECT_GT(gradient(1).abs().max().item<double>(), 1e-3);
  EXPECT_LT(greatest_difference(gradient(5), gradient(1)), 1e-12);
  // Of different tokens: the value of one of them in each channel, at least that of any mean.
  const TestModel mean = make_test_classifier("bias: true", {"model.layers=1"});
  enlarge_parameters(*mean.model);
  parameter_of(*mean.model, "final_norm.bias").detach().fill_(-50);
  const auto biased = [&](const TestModel& of) {  // class 0 adds up the channels
    parameter_of(*of.model, "output.weight").detach().zero_()[0].fill_(1);
    const at::Tensor log_p = log_probabilities(of, batch);
    return at::Tensor(log_p.select(1, 0) - log_p.select(1, 1));
  };
  EXPECT_TRUE(biased(model)
                  .gt(biased(mean) + 1e-6)
                  .logical_or(batch.at("lengths").eq(1))
                  .all()
                  .item<bool>());
}

// A token sees later ones: the output of the first token knows the last.
TEST(TextClassifier, TokensSeeLaterTokens) {
  const TestModel model = make_test_classifier("", {"task.classification.pooling=first"});
  enlarge_parameters(*model.model);
  const Batch batch = make_texts({kTokens});
  Batch changed = batch;
  changed.fields["inputs"] = batch.at("inputs").clone();
  changed.fields["inputs"].narrow(1, kTokens - 1, 1).add_(3).remainder_(kVocabulary);
  EXPECT_GT(greatest_difference(log_probabilities(model, changed), log_probabilities(model, batch)),
            1e-6);
}

TEST(TextClassifier, ParametersAndFlops) {
  const TestModel model = make_test_classifier("bias: true");
  EXPECT_EQ(parameter_of(*model.model, "output.weight").sizes(), (std::vector<std::int64_t>{3, 8}));
  EXPECT_EQ(parameter_of(*model.model, "output.bias").sizes(), (std::vector<std::int64_t>{3}));
  // As in language_model_test.cpp, but all 16 x 16 pairs of tokens and one output per text.
  EXPECT_EQ(make_test_classifier("").model->forward_flops_per_sequence(),
            2 * (2.0 * 16 * 768 + 4.0 * 256 * 8) + 2.0 * 24);
  EXPECT_EQ(model.model->decoder(), nullptr);
  EXPECT_NE(model.model->classifier(), nullptr);
}

TEST(TextClassifier, RefusesAnotherNumberOfClasses) {
  const auto task = make_task(parse_config(
      "task { classification { classes: 4 label: 'mood' } } data { corpus: 'none' }", "test", {}));
  try {
    task->make_model({.vocabulary = kVocabulary, .class_names = {"bad", "fair", "good"}}, at::kCPU);
    FAIL() << "four classes were accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kConfig);
    EXPECT_STREQ(error.what(),
                 "task.classification.classes: is 4, but the corpus has 3 classes for its label "
                 "'mood'; set it to 3");
  }
}

}  // namespace
}  // namespace birkhoff
