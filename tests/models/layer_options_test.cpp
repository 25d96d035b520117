// Layers with post-norm, without feed-forward sublayers, and with heads of any width, against plain
// formulas.
//
// Legend: B batch, T tokens, C channels, H heads, D head dim.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "configs/schema/config.pb.h"
#include "model_fixture.h"
#include "models/describe.h"

namespace birkhoff {
namespace {

// The model of the fixture in LibTorch operations: layers of dense causal attention.
struct PlainModel {
  Model& of;
  bool post, feed_forward;
  std::int64_t heads;

  at::Tensor parameter(const std::string& name) const { return parameter_of(of, name); }
  at::Tensor linear(const at::Tensor& x, const std::string& name) const {
    return at::matmul(x, parameter(name + ".weight").t()) + parameter(name + ".bias");
  }
  at::Tensor norm(const at::Tensor& x_BTC, const std::string& name) const {
    const at::Tensor centred = x_BTC - x_BTC.mean(-1, true);
    return centred / (centred.square().mean(-1, true) + 1e-5).sqrt() * parameter(name + ".weight") +
           parameter(name + ".bias");
  }
  at::Tensor attend(const at::Tensor& x_BTC, const std::string& name) const {
    const at::Tensor heads_3BHTD = linear(x_BTC, name + ".query_key_value")
                                       .unflatten(-1, {3, heads, -1})
                                       .permute({2, 0, 3, 1, 4});
    const at::Tensor q = heads_3BHTD[0], k = heads_3BHTD[1], v = heads_3BHTD[2];
    const std::int64_t T = x_BTC.size(1);
    const at::Tensor scores =
        at::matmul(q, k.transpose(2, 3)) / std::sqrt(static_cast<double>(q.size(3)));
    const at::Tensor later = at::ones({T, T}, at::kBool).triu(1);
    const at::Tensor weights = at::softmax(scores.masked_fill(later, -INFINITY), -1);
    return linear(at::matmul(weights, v).transpose(1, 2).flatten(2), name + ".output");
  }
  at::Tensor sublayer(const at::Tensor& x_BTC, const std::string& name,
                      const std::function<at::Tensor(const at::Tensor&)>& f) const {
    return post ? norm(x_BTC + f(x_BTC), name + "_norm") : x_BTC + f(norm(x_BTC, name + "_norm"));
  }
  at::Tensor logits(const Batch& batch) const {
    const at::Tensor table = parameter("embedding.weight");
    const at::Tensor& ids_BT = batch.at("inputs");
    at::Tensor x =
        at::embedding(table, ids_BT) + parameter("positions.weight").narrow(0, 0, ids_BT.size(1));
    for (int layer = 0; layer < 2; ++layer) {
      const std::string block = "blocks." + std::to_string(layer) + ".";
      x = sublayer(x, block + "attention",
                   [&](const at::Tensor& y) { return attend(y, block + "attention"); });
      if (!feed_forward) continue;
      x = sublayer(x, block + "feed_forward", [&](const at::Tensor& y) {
        return linear(at::gelu(linear(y, block + "feed_forward.up")), block + "feed_forward.down");
      });
    }
    return at::matmul(post ? x : norm(x, "final_norm"), table.t());
  }
};

struct Options {
  const char* text;
  bool post, feed_forward;
  std::int64_t head_channels;
};
constexpr Options kOptions[] = {
    {"", false, true, 4},
    {"norm: post", true, true, 4},
    {"attention_only: true", false, false, 4},
    {"head_channels: 7", false, true, 7},
    {"norm: post attention_only: true head_channels: 3", true, false, 3}};

TestModel make(const Options& options, const std::vector<std::string>& settings = {}) {
  TestModel model = make_test_model("bias: true " + std::string(options.text), settings);
  enlarge_parameters(*model.model);
  for (const Parameter& p : model.model->parameters().list()) {  // neither 0 nor 1
    if (p.value.dim() == 1) p.value.detach().add_(at::arange(p.value.numel()).sin() * 0.3);
  }
  return model;
}

TEST(LayerOptions, ModelsAreTheirFormulas) {
  for (const Options& options : kOptions) {
    SCOPED_TRACE(options.text);
    const TestModel model = make(options);
    const Batch batch = make_batch(3, 13);
    const PlainModel plain{*model.model, options.post, options.feed_forward, 2};
    const at::Tensor logits = model->logits(batch, std::nullopt), expected = plain.logits(batch);
    EXPECT_LT(greatest_difference(logits, expected),
              1e-11 * std::max(1.0, expected.abs().max().item<double>()));
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& each : {logits, expected}) {
      (each * at::arange(each.numel()).cos().view(each.sizes())).sum().backward();
      for (const Parameter& p : model.model->parameters().list()) {
        ASSERT_TRUE(p.value.grad().defined()) << p.name;
        gradients.push_back(p.value.grad());
        p.value.mutable_grad() = at::Tensor();
      }
    }
    for (std::size_t i = 0; i < gradients.size() / 2; ++i) {
      const at::Tensor& right = gradients[i + gradients.size() / 2];
      EXPECT_LT(greatest_difference(gradients[i], right),
                1e-11 * std::max(1.0, right.abs().max().item<double>()))
          << model.model->parameters().list()[i].name;
    }
  }
}

TEST(LayerOptions, NamesAndSizes) {
  const auto names = [](const TestModel& model) {
    std::vector<std::string> all;
    for (const Parameter& p : model.model->parameters().list()) all.push_back(p.name);
    return all;
  };
  using testing::Contains;
  using testing::EndsWith;
  using testing::HasSubstr;
  using testing::Not;
  const std::vector<std::string> of_post = names(make_test_model("norm: post"));
  EXPECT_THAT(of_post, Contains("blocks.1.feed_forward_norm.weight"));
  EXPECT_THAT(of_post, Not(Contains(HasSubstr("final_norm"))));
  const std::vector<std::string> of_attention = names(make_test_model("attention_only: true"));
  EXPECT_THAT(of_attention, Not(Contains(HasSubstr("feed_forward"))));
  EXPECT_THAT(of_attention, Contains("final_norm.weight"));
  const TestModel wide = make_test_model("head_channels: 7");
  EXPECT_EQ(parameter_of(*wide.model, "blocks.0.attention.query_key_value.weight").sizes(),
            at::IntArrayRef({3 * 2 * 7, 8}));
  EXPECT_EQ(parameter_of(*wide.model, "blocks.0.attention.output.weight").sizes(),
            at::IntArrayRef({8, 2 * 7}));
  EXPECT_THAT(describe_model(*wide.model, 16), HasSubstr("blocks.0.attention "));
}

// The hand count of language_model_test.cpp: in a layer 16 tokens times matrices, and 136 pairs of
// causal attention, each 2 products of the heads' channels; an output layer of 11 x 8.
TEST(LayerOptions, FlopsEqualTheHandCount) {
  const auto flops = [](const char* text) {
    return make_test_model(text)->forward_flops_per_sequence();
  };
  const double output = 2.0 * 16 * 88;
  EXPECT_EQ(flops("norm: post"), 2 * (2.0 * 16 * 768 + 4.0 * 136 * 8) + output);
  EXPECT_EQ(flops("attention_only: true"), 2 * (2.0 * 16 * 256 + 4.0 * 136 * 8) + output);
  EXPECT_EQ(flops("head_channels: 7"),
            2 * (2.0 * 16 * (8 * 42 + 14 * 8 + 512) + 4.0 * 136 * 14) + output);
}

// The output projections of a layer are scaled by the number of sublayers that there are.
TEST(LayerOptions, InitialScales) {
  const TestModel model =
      make_test_model("attention_only: true", {"model.channels=64", "model.layers=4"});
  EXPECT_NEAR(parameter_of(*model.model, "blocks.2.attention.output.weight").std().item<double>(),
              0.01, 5e-4);
}

TEST(LayerOptions, DecodingEqualsTheForwardPass) {
  for (const Options& options : kOptions) {
    const TestModel model = make(options);
    const Batch batch = make_batch(3, 16);
    const at::Tensor logits_BTV = model->logits(batch, std::nullopt);
    const auto cache = model->decode_cache(3);
    for (std::int64_t t = 0; t < 16; ++t) {
      const at::Tensor next_BV = model->decode_step(*cache, batch.at("inputs").select(1, t));
      EXPECT_LE(greatest_difference(logits_BTV.select(1, t), next_BV), 1e-11)
          << options.text << " t=" << t;
    }
  }
}

TEST(LayerOptions, RecomputationGivesTheSameBits) {
  for (const Options& options : kOptions) {
    const Batch batch = make_batch(3, 16);
    const auto gradients = [&](const std::string& recompute) {
      std::vector<std::string> settings = {
          "train.recompute=" + recompute, "model.dropout.residual=0.2", "train.precision=fp32",
          "model.attention=[{group: [{mechanism {routing {clusters: 2 commitment: 0.5}}}]}]"};
      const TestModel model = make(options, settings);
      model->loss_sums(batch, make_noise(batch)).loss.backward();
      std::vector<at::Tensor> all;
      for (const Parameter& p : model->parameters().list()) all.push_back(p.value.grad());
      return all;
    };
    const auto expected = gradients("false"), found = gradients("true");
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(at::equal(expected[i], found[i])) << options.text << " " << i;
    }
  }
}

// A decoder that reads an encoder: every sublayer of both stacks is normed once, at its end.
TEST(LayerOptions, TwoStacksOfPostNormLayersEndInANorm) {
  const configs::Config config = parse_config(
      "task { translation {} } data { corpus: 'none' sequence_length: 16 } "
      "train { precision: fp64 } model { layers: 2 channels: 8 heads: 2 norm: post }",
      "test", {});
  Parameters parameters = make_parameters(config, at::kCPU);
  const TokenStack encoder(config, StackRole::kSourceEncoder, parameters),
      decoder(config, StackRole::kTargetDecoder, parameters);
  for (const Parameter& p : parameters.list()) {
    EXPECT_EQ(p.name.find("final_norm"), std::string::npos) << p.name;
    if (p.value.dim() > 1) p.value.detach().mul_(15);
  }
  const Batch source = make_batch(2, 13, 5), target = make_batch(2, 10, 7);
  NamedSums sums;
  const Memory memory = encoder.encode(source, std::nullopt, sums);
  const at::Tensor y_BTC = decoder.forward(target, std::nullopt, sums, memory);
  // With gain 1 and no bias the outputs of a norm have mean 0 and variance 1.
  for (const at::Tensor& x : {memory.x_BSC, y_BTC}) {
    EXPECT_LT(x.mean(-1).abs().max().item<double>(), 1e-12);
    EXPECT_LT((x.square().mean(-1) - 1).abs().max().item<double>(), 1e-4);
  }
  const auto cache = decoder.stack.decode_cache(2, memory);
  for (std::int64_t t = 0; t < 10; ++t) {
    const at::Tensor x = decoder.decode_step(*cache, target.at("inputs").select(1, t));
    EXPECT_LT(greatest_difference(x.select(1, 0), y_BTC.select(1, t)), 1e-12) << t;
  }
}

}  // namespace
}  // namespace birkhoff
