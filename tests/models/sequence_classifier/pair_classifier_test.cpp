// Classifiers of two texts, each of which the stack reads by itself.
//
// Legend: B batch, T tokens, C channels, K classes.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "cluster/base/error.h"
#include "tests/models/model_fixture.h"

namespace birkhoff {
namespace {

constexpr std::int64_t kTextPairs = 3, kTextTokens = 16, kTowerChannels = 8;

Batch make_text_pairs() {
  Batch batch;
  batch.fields["inputs"] =
      test_ids(2 * kTextPairs, kTextTokens, 21).view({kTextPairs, 2, kTextTokens});
  batch.fields["lengths"] = at::tensor({16, 5, 1, 12, 7, 7}, at::kLong).view({kTextPairs, 2});
  batch.fields["labels"] = at::arange(kTextPairs, at::kLong);
  batch.sample_ids_B = at::arange(kTextPairs, at::kLong) + 100;
  return batch;
}

// All first (0) or second (1) texts.
Batch single_texts(const Batch& pairs, std::int64_t k) {
  Batch batch;
  batch.fields["inputs"] = pairs.at("inputs").select(1, k).contiguous();
  batch.fields["lengths"] = pairs.at("lengths").select(1, k).contiguous();
  batch.fields["labels"] = pairs.at("labels");
  batch.sample_ids_B = pairs.sample_ids_B;
  return batch;
}

TestModel make_towers(const std::string& model_text = "bias: true",
                      const std::vector<std::string>& settings = {}) {
  TestModel model = make_test_model_of(
      "classification { classes: 3 second_stream: 'second' pair_model: two_towers }", model_text,
      settings, at::kCPU);
  enlarge_parameters(*model.model);
  return model;
}

at::Tensor log_p_of_pairs(const TestModel& model, const Batch& batch) {
  return model.model->classifier()->log_probabilities(batch);
}

// The pooled vectors [B, C] of a classifier of single texts, one channel after another: the logits
// of two classes differ by it.
at::Tensor pooled_vectors(const TestModel& single, const Batch& texts) {
  const at::Tensor weight_KC = parameter_of(*single.model, "output.weight").detach();
  parameter_of(*single.model, "output.bias").detach().zero_();
  std::vector<at::Tensor> channels;
  for (std::int64_t c = 0; c < kTowerChannels; ++c) {
    weight_KC.zero_()[0][c].fill_(1);
    const at::Tensor log_p_BK = log_p_of_pairs(single, texts);
    channels.push_back(log_p_BK.select(1, 0) - log_p_BK.select(1, 1));
  }
  return at::stack(channels, 1);
}

// [a, b, |a - b|, a b] into the output layer, with the vectors of a classifier of single texts that
// has the same parameters.
TEST(PairClassifier, CombinesTheVectorsOfBothTexts) {
  for (const char* pooling : {"mean", "first", "max"}) {
    const std::vector<std::string> settings = {"task.classification.pooling=" +
                                               std::string(pooling)};
    const TestModel towers = make_towers("bias: true", settings),
                    single = make_test_classifier("bias: true", settings);
    for (const Parameter& parameter : single.model->parameters().list()) {
      if (parameter.name == "output.weight") continue;
      parameter.value.detach().copy_(parameter_of(*towers.model, parameter.name).detach());
    }
    const Batch pairs = make_text_pairs();
    const at::Tensor a_BC = pooled_vectors(single, single_texts(pairs, 0)),
                     b_BC = pooled_vectors(single, single_texts(pairs, 1));
    const at::Tensor weight = parameter_of(*towers.model, "output.weight").detach();
    ASSERT_EQ(weight.sizes(), (std::vector<std::int64_t>{3, 4 * kTowerChannels}));
    const at::Tensor bias = parameter_of(*towers.model, "output.bias").detach().fill_(0.1);
    const at::Tensor features = at::cat({a_BC, b_BC, (a_BC - b_BC).abs(), a_BC * b_BC}, 1);
    EXPECT_LT(greatest_difference(log_p_of_pairs(towers, pairs),
                                  (features.matmul(weight.t()) + bias).log_softmax(1)),
              1e-9)
        << pooling;
  }
}

TEST(PairClassifier, PaddingAndOtherPairsDoNotMatter) {
  for (const char* mechanism :
       {"dense {}", "sinkhorn { block: 4 }", "routing { clusters: 4 window: 8 }",
        "sinkformer { half_steps: 3 }"}) {
    const TestModel model = make_towers("attention { group { mechanism { " +
                                        std::string(mechanism) + " } } } bias: true");
    const Batch pairs = make_text_pairs();
    const at::Tensor all_BK = log_p_of_pairs(model, pairs);
    for (std::int64_t i = 0; i < kTextPairs; ++i) {
      Batch alone = pairs.narrow(i, i + 1);
      const std::int64_t longest = alone.at("lengths").max().item<std::int64_t>();
      alone.fields["inputs"] = alone.at("inputs").narrow(2, 0, longest);
      EXPECT_LT(greatest_difference(log_p_of_pairs(model, alone)[0], all_BK[i]), 1e-10)
          << mechanism << ", pair " << i;
    }
  }
}

// Training: noise of a text depends neither on the batch nor on the other text.
TEST(PairClassifier, NoiseIsThatOfTheTextInAnyBatch) {
  const TestModel model = make_towers(
      "attention { group { mechanism { sinkhorn { block: 4 gumbel_noise: true dropout: 0.1 } } } } "
      "dropout { embedding: 0.2 residual: 0.2 }");
  const Batch pairs = make_text_pairs();
  const auto loss_of = [&](const Batch& batch) {
    return model.model->loss_sums(batch, make_noise(batch)).loss.item<double>();
  };
  double sum = 0;
  for (std::int64_t i = 0; i < kTextPairs; ++i) sum += loss_of(pairs.narrow(i, i + 1));
  EXPECT_NEAR(loss_of(pairs), sum, 1e-10);
  // Two equal texts of a pair have noise of their own: their vectors differ, and so does |a - b|.
  Batch equal = pairs.narrow(0, 1);
  equal.fields["inputs"] = equal.at("inputs").select(1, 0).unsqueeze(1).repeat({1, 2, 1});
  equal.fields["lengths"] = at::full({1, 2}, kTextTokens, at::kLong);
  parameter_of(*model.model, "output.weight")
      .detach()
      .zero_()[0]
      .narrow(0, 2 * kTowerChannels, kTowerChannels)
      .fill_(1);
  const LossSums noisy = model.model->loss_sums(equal, make_noise(equal)),
                 quiet = model.model->loss_sums(equal, std::nullopt);
  EXPECT_NEAR(quiet.loss.item<double>(), std::log(3.0), 1e-12);
  EXPECT_GT(std::abs(noisy.loss.item<double>() - std::log(3.0)), 1e-3);
}

// A pair is one target: its commitment is the mean over the tokens of both texts.
TEST(PairClassifier, CountsPairsAndTokensOfBothTexts) {
  const TestModel model = make_towers(
      "positions: no_positions attention { group { mechanism { routing { clusters: 1 window: 16 "
      "commitment: 0.5 } } } }");
  Batch batch = make_text_pairs();
  const LossSums sums = model.model->loss_sums(batch, std::nullopt);
  EXPECT_EQ(sums.count.item<double>(), kTextPairs);
  EXPECT_EQ(sums.tokens.item<double>(), 16 + 5 + 1 + 12 + 7 + 7);
  ASSERT_EQ(sums.predicted_B.sizes(), (std::vector<std::int64_t>{kTextPairs}));
  // Texts of one token that is always the same: all pairs add the same.
  batch.fields["inputs"].fill_(4);
  const auto commitment_of = [&](const Batch& pairs) {
    double sum = 0;
    for (const auto& [name, value] : model.model->loss_sums(pairs, make_noise(pairs)).named)
      if (name.ends_with(".auxiliary_loss")) sum += value.item<double>();
    return sum;
  };
  const double one = commitment_of(batch.narrow(0, 1));
  EXPECT_GT(one, 0);
  EXPECT_NEAR(commitment_of(batch), kTextPairs * one, 1e-12);
}

TEST(PairClassifier, FlopsAndRefusals) {
  const double single = make_test_classifier("").model->forward_flops_per_sequence(),
               towers = make_towers("").model->forward_flops_per_sequence();
  const double output = 2.0 * 3 * kTowerChannels;
  EXPECT_EQ(towers, 2 * (single - output) + 4 * output);
  try {
    log_p_of_pairs(make_towers(), single_texts(make_text_pairs(), 0));
    FAIL() << "single texts were accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kData);
    EXPECT_STREQ(error.what(), "a sample is one text, but the model reads pairs of texts");
  }
}

}  // namespace
}  // namespace birkhoff
