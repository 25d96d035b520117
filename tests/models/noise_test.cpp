// Noise in training: keyed only by step and sample, wherever there is noise.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <set>

#include "model_fixture.h"
#include "models/transformer/layers.h"

namespace birkhoff {
namespace {

// Every source of randomness, in three layers with different attention. If the weights of a SortNet
// were balanced, its bias would have no effect: the balance starts with the columns and cancels it.
constexpr const char* kNoisy = R"(
    bias: true
    attention {
      group { heads: 1 mechanism { dense { dropout: 0.2 } } }
      group { mechanism { sinkhorn {
        block: 4 causal_balance: none tie_key_value: true gumbel_noise: true dropout: 0.2 } } }
    }
    attention {
      group { mechanism { sinkhorn { block: 4 sort_net: attention gumbel_noise: true } } }
    }
    attention {
      group { heads: 1 mechanism { routing { clusters: 2 dropout: 0.2 } } }
      group { mechanism { moba { block: 4 top_blocks: 2 dropout: 0.2 } } }
    }
    dropout { embedding: 0.2 residual: 0.3 activation: 0.1 token: 0.1 })";

std::map<std::string, at::Tensor> gradients(const TestModel& model, const at::Tensor& loss) {
  for (const Parameter& parameter : model->parameters().list()) {
    at::Tensor value = parameter.value;
    value.mutable_grad() = at::Tensor();
  }
  loss.backward();
  std::map<std::string, at::Tensor> result;
  for (const Parameter& parameter : model->parameters().list()) {
    result[parameter.name] = parameter.value.grad().clone();
  }
  return result;
}

TEST(Noise, GradientsDoNotDependOnTheSplitIntoMicroBatches) {
  const TestModel model = make_test_model(kNoisy, {"model.layers=3"});
  enlarge_parameters(*model.model);
  Batch batch = make_batch(4, 16);
  batch.sample_ids_B = at::tensor({31, 4, 15, 9}, at::kLong);
  const LossSums whole = model->loss_sums(batch, make_noise(batch));
  const auto gradient = gradients(model, whole.loss);
  at::Tensor loss = at::zeros({}, at::kDouble);
  for (const auto& [begin, end] : {std::pair{3, 4}, std::pair{0, 1}, std::pair{1, 3}}) {
    const Batch part = batch.narrow(begin, end);
    loss = loss + model->loss_sums(part, make_noise(part)).loss;
  }
  EXPECT_NEAR(loss.item<double>(), whole.loss.item<double>(), 1e-12 * whole.loss.item<double>());
  for (const auto& [name, sum] : gradients(model, loss)) {
    EXPECT_LE(greatest_difference(sum, gradient.at(name)),
              1e-12 * std::max(1.0, sum.abs().max().item<double>()))
        << name;
  }
}

// With fixed noise, the training loss is a plain function of the parameters.
TEST(Noise, GradientOfEveryParameterIsTheDifferenceQuotient) {
  const TestModel model = make_test_model(kNoisy, {"model.layers=3"});
  enlarge_parameters(*model.model);
  const Batch batch = make_batch(2, 16);
  const auto loss = [&] { return model->loss_sums(batch, make_noise(batch)).loss; };
  const auto gradient = gradients(model, loss());
  for (const Parameter& parameter : model->parameters().list()) {
    const at::Tensor values = parameter.value.detach().view(-1);
    bool any_slope = false;
    for (const std::int64_t i : {std::int64_t{0}, values.numel() / 3, values.numel() - 1}) {
      constexpr double kStep = 2e-6;
      const double value = values[i].item<double>();
      const auto loss_at = [&](double x) {
        values[i].fill_(x);
        return loss().item<double>();
      };
      const double slope = (loss_at(value + kStep) - loss_at(value - kStep)) / (2 * kStep);
      values[i].fill_(value);
      const double found = gradient.at(parameter.name).view(-1)[i].item<double>();
      EXPECT_NEAR(found, slope, 1e-7 + 1e-6 * std::abs(slope)) << parameter.name << " " << i;
      any_slope = any_slope || std::abs(slope) > 1e-6;
    }
    EXPECT_TRUE(any_slope) << parameter.name << " has no influence";
  }
}

TEST(Noise, EachSourceIsOfItsStepAndSampleAndAbsentInEvaluation) {
  const Batch batch = make_batch(2, 16);
  for (const char* const setting :
       {"model.dropout.embedding=0.2", "model.dropout.residual=0.2", "model.dropout.activation=0.2",
        "model.dropout.token=0.3", "model.attention.0.group.0.mechanism.sinkhorn.dropout=0.2",
        "model.attention.0.group.0.mechanism.sinkhorn.gumbel_noise=true"}) {
    const std::string attention = "attention { group { mechanism { sinkhorn { block: 4 } } } }";
    const TestModel noisy = make_test_model(attention, {setting});
    const TestModel quiet = make_test_model(attention);
    enlarge_parameters(*noisy.model);
    enlarge_parameters(*quiet.model);
    const at::Tensor once_BTV = noisy->logits(batch, make_noise(batch, 1));
    EXPECT_TRUE(at::equal(once_BTV, noisy->logits(batch, make_noise(batch, 1)))) << setting;
    EXPECT_FALSE(at::equal(once_BTV, noisy->logits(batch, make_noise(batch, 2)))) << setting;
    NoiseKey other_sample = make_noise(batch, 1);
    other_sample.sample_ids_B = other_sample.sample_ids_B + at::tensor({0, 1}, at::kLong);
    const at::Tensor other_BTV = noisy->logits(batch, other_sample);
    EXPECT_TRUE(at::equal(once_BTV[0], other_BTV[0])) << setting;
    EXPECT_FALSE(at::equal(once_BTV[1], other_BTV[1])) << setting;
    EXPECT_TRUE(at::equal(noisy->logits(batch, {}), quiet->logits(batch, {}))) << setting;
    EXPECT_FALSE(at::equal(noisy->logits(batch, {}), once_BTV)) << setting;
  }
}

// Whole tokens are 0 before positions are added, the others keep their values.
TEST(Noise, DroppedTokensHaveNoChannels) {
  constexpr double kShare = 0.25;
  constexpr std::int64_t kRows = 500, kTokens = 16;
  const std::string text =
      "task { language_model {} } data { corpus: 'none' sequence_length: 16 } train { precision: "
      "fp64 } model { layers: 1 channels: 8 heads: 2 positions: sinusoidal dropout { token: 0.25 } "
      "}";
  Parameters parameters(3, at::kDouble);
  const TokenStack model(parse_config(text, "test", {}), StackRole::kDecoder, parameters);
  const Batch batch = make_batch(kRows, kTokens);
  const auto embedded = [&](const std::optional<NoiseKey>& noise) {
    return model.embedding(batch, token_slices(batch, parameters), noise);
  };
  const at::Tensor positions_TC = sinusoid_table(kTokens, 8);
  const at::Tensor whole_BTC = embedded(std::nullopt), noisy_BTC = embedded(make_noise(batch));
  const at::Tensor dropped_BT = noisy_BTC.ne(whole_BTC).any(-1);
  EXPECT_TRUE(at::equal(noisy_BTC, at::where(dropped_BT.unsqueeze(-1), positions_TC, whole_BTC)));
  // Binomial: 4 standard deviations.
  const double n = kRows * kTokens, count = dropped_BT.sum().item<double>();
  EXPECT_NEAR(count, kShare * n, 4 * std::sqrt(n * kShare * (1 - kShare)));
  // A sample's tokens do not depend on the length of its batch.
  Batch shorter = batch;
  shorter.fields["inputs"] = batch.at("inputs").narrow(1, 0, 5);
  EXPECT_TRUE(
      at::equal(model.embedding(shorter, token_slices(shorter, parameters), make_noise(batch)),
                noisy_BTC.narrow(1, 0, 5)));
}

// Consumers with the same number would drop the same elements.
TEST(Noise, ConsumersHaveNumbersOfTheirOwn) {
  std::set<std::uint32_t> numbers;
  std::set<std::int64_t> blocks;
  for (const NoiseLayers layers :
       {NoiseLayers::kStack, NoiseLayers::kCrossAttention, NoiseLayers::kSourceEncoder}) {
    blocks.insert(noise_number(layers, 0));
    blocks.insert(noise_number(layers, kMaxLayers - 1));
  }
  EXPECT_EQ(blocks.size(), 6);
  for (const std::int64_t block : blocks) {
    numbers.insert(noise_layer(block, RandomStream::kAttention));
    numbers.insert(noise_layer(block, RandomStream::kFeedForward));
    for (std::uint32_t group = 0; group < kMaxHeadGroups; ++group) {
      numbers.insert(noise_layer(block, RandomStream::kHeadGroup, group));
    }
  }
  EXPECT_EQ(numbers.size(), 6 * (kMaxHeadGroups + 2));
}

}  // namespace
}  // namespace birkhoff
