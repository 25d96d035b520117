// Two stacks: an encoder, and a decoder whose layers read its outputs by cross-attention.
//
// Legend: B batch, T tokens of the target, S tokens of the source, C channels, H heads, D head dim.
#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "cluster/base/error.h"
#include "model_fixture.h"

namespace birkhoff {
namespace {

constexpr std::int64_t kSource = 13, kTarget = 10;

// Encoder and decoder, with the parameters and the group that they live in. Two layers each, 8
// channels, 2 heads, 16 tokens, fp64.
struct TwoStacks {
  explicit TwoStacks(const std::string& model_text = "",
                     const std::vector<std::string>& settings = {})
      : config(parse_config(
            "task { translation {} } data { corpus: 'none' sequence_length: 16 } "
            "train { precision: fp64 } model { layers: 2 channels: 8 heads: 2 bias: true " +
                model_text + " }",
            "test", settings)),
        parameters(make_parameters(config, at::kCPU)),
        encoder(config, StackRole::kSourceEncoder, parameters),
        decoder(config, StackRole::kTargetDecoder, parameters) {
    for (const Parameter& parameter : parameters.list()) {
      if (parameter.value.dim() > 1) parameter.value.detach().mul_(15);
    }
  }

  Memory encode(const Batch& source, const std::optional<NoiseKey>& noise = {}) const {
    NamedSums sums;
    return encoder.encode(source, noise, sums);
  }
  at::Tensor decode(const Batch& target, const Memory& memory,
                    const std::optional<NoiseKey>& noise = {}) const {
    NamedSums sums;
    return decoder.forward(target, noise, sums, memory);
  }
  at::Tensor at(const std::string& name) const {
    for (const Parameter& parameter : parameters.list()) {
      if (parameter.name == name) return parameter.value;
    }
    ADD_FAILURE() << "no parameter " << name;
    return {};
  }

  configs::Config config;
  Parameters parameters;
  TokenStack encoder, decoder;
};

Batch source_batch() {
  Batch batch = make_batch(2, kSource, 5);
  batch.fields["lengths"] = at::tensor({kSource, std::int64_t{6}}, at::kLong);
  return batch;
}
Batch target_batch() { return make_batch(2, kTarget, 9); }

TEST(CrossAttention, ParametersOfTheTwoStacksHaveNamesOfTheirOwn) {
  const TwoStacks model;
  std::vector<std::string> names;
  for (const Parameter& parameter : model.parameters.list()) names.push_back(parameter.name);
  // In the order of the forward pass: gradient buckets fill from the end.
  std::vector<std::string> expected;
  const auto layer = [&](const std::string& prefix, const std::vector<std::string>& parts) {
    for (const std::string& part : parts) {
      for (const char* const kind : {".weight", ".bias"}) expected.push_back(prefix + part + kind);
    }
  };
  for (const std::string& stack : {std::string("encoder."), std::string()}) {
    expected.push_back(stack + "embedding.weight");
    expected.push_back(stack + "positions.weight");
    for (const std::string& block : {stack + "blocks.0.", stack + "blocks.1."}) {
      layer(block, {"attention_norm", "attention.query_key_value", "attention.output"});
      if (stack.empty()) {
        layer(block, {"cross_attention_norm", "cross_attention.query", "cross_attention.key_value",
                      "cross_attention.output"});
      }
      layer(block, {"feed_forward_norm", "feed_forward.up", "feed_forward.down"});
    }
    layer(stack, {"final_norm"});
  }
  EXPECT_EQ(names, expected);
  EXPECT_EQ(model.at("blocks.0.cross_attention.query.weight").sizes(), at::IntArrayRef({8, 8}));
  EXPECT_EQ(model.at("blocks.0.cross_attention.key_value.weight").sizes(),
            at::IntArrayRef({16, 8}));
}

// The decoder in plain operations, from the parameters; with noise, residual dropout of 0.3.
at::Tensor expected_outputs(const TwoStacks& model, const Batch& target, const Memory& memory,
                            const std::optional<NoiseKey>& noise = {}) {
  const std::int64_t num_targets = target.at("inputs").size(1);
  const std::int64_t num_sources = memory.x_BSC.size(1);
  const auto drop = [&](const at::Tensor& x, NoiseLayers layers, std::int64_t number,
                        RandomStream consumer) {
    return noise
               ? philox_dropout(
                     x, 0.3F, noise->at_layer(noise_layer(noise_number(layers, number), consumer)),
                     NoisePurpose::kResidualDropout)
               : x;
  };
  const auto norm = [&](const at::Tensor& x, const std::string& name) {
    return at::layer_norm(x, {8}, model.at(name + ".weight"), model.at(name + ".bias"), 1e-5);
  };
  const auto linear = [&](const at::Tensor& x, const std::string& name) {
    return at::linear(x, model.at(name + ".weight"), model.at(name + ".bias"));
  };
  const auto heads = [](const at::Tensor& x) { return x.unflatten(-1, {2, 4}).transpose(1, 2); };
  const auto attend = [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const at::Tensor& mask) {
    const at::Tensor logits = at::matmul(heads(q), heads(k).transpose(2, 3)) / 2;
    const at::Tensor p = logits.masked_fill(mask.logical_not(), -INFINITY).softmax(-1);
    return at::matmul(p, heads(v)).transpose(1, 2).flatten(2);
  };
  const at::Tensor past = at::ones({num_targets, num_targets}, at::kBool).tril();
  const at::Tensor real =
      at::arange(num_sources).lt(memory.lengths_B.view({2, 1, 1, 1}));  // [B, 1, 1, S]
  at::Tensor x = at::embedding(model.at("embedding.weight"), target.at("inputs")) +
                 model.at("positions.weight").narrow(0, 0, num_targets);
  for (std::int64_t n = 0; n < 2; ++n) {
    const std::string layer = "blocks." + std::to_string(n) + ".";
    const auto qkv =
        linear(norm(x, layer + "attention_norm"), layer + "attention.query_key_value").chunk(3, -1);
    x = x + drop(linear(attend(qkv[0], qkv[1], qkv[2], past), layer + "attention.output"),
                 NoiseLayers::kStack, n, RandomStream::kAttention);
    const at::Tensor q =
        linear(norm(x, layer + "cross_attention_norm"), layer + "cross_attention.query");
    const auto kv = linear(memory.x_BSC, layer + "cross_attention.key_value").chunk(2, -1);
    x = x + drop(linear(attend(q, kv[0], kv[1], real), layer + "cross_attention.output"),
                 NoiseLayers::kCrossAttention, n, RandomStream::kAttention);
    const at::Tensor up = linear(norm(x, layer + "feed_forward_norm"), layer + "feed_forward.up");
    x = x + drop(linear(at::gelu(up), layer + "feed_forward.down"), NoiseLayers::kStack, n,
                 RandomStream::kFeedForward);
  }
  return norm(x, "final_norm");
}

TEST(CrossAttention, EqualsTheFormula) {
  const TwoStacks model("dropout { residual: 0.3 }");
  const auto gradients_of = [&](const at::Tensor& out) {
    std::vector<at::Tensor> leaves;
    for (const Parameter& parameter : model.parameters.list()) leaves.push_back(parameter.value);
    return torch::autograd::grad({(out * out.detach().cos()).sum()}, leaves);
  };
  const Batch source = source_batch();
  for (const std::int64_t num_targets : {kTarget, kSource}) {
    const Batch target = make_batch(2, num_targets, 9);
    for (const bool noisy : {false, true}) {
      const std::optional<NoiseKey> noise =
          noisy ? std::optional(make_noise(target)) : std::nullopt;
      const Memory memory = model.encode(source, noise), same = model.encode(source, noise);
      const at::Tensor out = model.decode(target, memory, noise);
      const at::Tensor expected = expected_outputs(model, target, same, noise);
      // The enlarged weights and dropout's factors amplify rounding.
      EXPECT_LE(greatest_difference(out, expected), 1e-10) << num_targets << noisy;
      const auto found = gradients_of(out), wanted = gradients_of(expected);
      for (std::size_t i = 0; i < found.size(); ++i) {
        const std::string& name = model.parameters.list()[i].name;
        EXPECT_LE(greatest_difference(found[i], wanted[i]), 1e-9) << name;
        EXPECT_GT(found[i].abs().max().item<double>(), 1e-6) << name;
      }
    }
  }
}

// N(0, 0.02 / sqrt(sublayers)) for what a sublayer adds to the residual stream.
TEST(CrossAttention, InitialValuesFollowTheDepthOfTheirStack) {
  const configs::Config config = parse_config(
      "task { translation {} } data { corpus: 'none' sequence_length: 16 } "
      "model { layers: 3 channels: 64 heads: 2 encoder { layers: 8 } }",
      "test", {});
  Parameters parameters = make_parameters(config, at::kCPU);
  const Stack encoder(config, StackRole::kSourceEncoder, parameters);
  const Stack decoder(config, StackRole::kTargetDecoder, parameters);
  for (const Parameter& parameter : parameters.list()) {
    const bool encodes = parameter.name.starts_with("encoder.");
    if (!parameter.name.ends_with("attention.output.weight")) continue;
    const double expected = 0.02 / std::sqrt(encodes ? 2.0 * 8 : 3.0 * 3);
    EXPECT_NEAR(parameter.value.std().item<double>(), expected, 0.05 * expected) << parameter.name;
  }
  // Each decoder layer: 2 T (self 4 C^2, cross 4 C^2, feed-forward 8 C^2), and the scores.
  const double T = 16, C = 64;
  EXPECT_EQ(decoder.forward_flops(16, 16),
            3 * (2 * T * 16 * C * C + 4 * C * (T * (T + 1) / 2) + 4 * C * T * T));
  EXPECT_EQ(encoder.forward_flops(16), 8 * (2 * T * 12 * C * C + 4 * C * T * T));
}

// Misuse by a model is a defect of the program, not of its input.
TEST(CrossAttention, MemoriesOfOthersAreRefused) {
  const TwoStacks model;
  const Batch source = source_batch(), target = target_batch();
  const Memory memory = model.encode(source);
  NamedSums sums;
  EXPECT_THROW(model.decode(target, {}), Error);
  EXPECT_THROW(model.decode(target.narrow(0, 1), memory), Error);
  EXPECT_THROW(model.decoder.encode(source, {}, sums), Error);
  EXPECT_THROW(model.encoder.forward(source, {}, sums, memory), Error);
  EXPECT_THROW(model.decoder.stack.decode_cache(3, memory), Error);
  Batch packed = source;
  packed.fields["segments"] = at::zeros({2, kSource}, at::kInt);
  EXPECT_THROW(model.encode(packed), Error);
}

TEST(CrossAttention, ReadsTheSourceButNotItsPaddingAndNoLaterTargets) {
  const TwoStacks model;
  const Batch source = source_batch(), target = target_batch();
  const at::Tensor out = model.decode(target, model.encode(source));
  const auto with = [](Batch batch, std::int64_t row, std::int64_t token) {
    at::Tensor& tokens = batch.fields["inputs"];
    tokens = tokens.clone();
    tokens[row][token] = (tokens[row][token] + 1).remainder(kVocabulary);
    return batch;
  };
  // The last source token reaches the first output of its sample only.
  const at::Tensor changed = model.decode(target, model.encode(with(source, 0, kSource - 1)));
  EXPECT_GT(greatest_difference(out[0][0], changed[0][0]), 1e-6);
  EXPECT_TRUE(at::equal(out[1], changed[1]));
  EXPECT_TRUE(at::equal(out, model.decode(target, model.encode(with(source, 1, 6)))));
  const at::Tensor later = model.decode(with(target, 0, 7), model.encode(source));
  EXPECT_TRUE(at::equal(out.narrow(1, 0, 7), later.narrow(1, 0, 7)));
  EXPECT_GT(greatest_difference(out[0][7], later[0][7]), 1e-6);
}

// All noise, and a memory that gets gradients from every layer of the decoder.
TEST(CrossAttention, RecomputationGivesTheSameBits) {
  const std::string text =
      "dropout { embedding: 0.2 residual: 0.3 activation: 0.1 } attention { group { mechanism { "
      "sinkhorn { block: 2 gumbel_noise: true dropout: 0.2 } } } } encoder { layers: 3 "
      "attention { group { mechanism { block_local { block: 4 dropout: 0.2 } } } } "
      "cross_attention { group { mechanism { dense { dropout: 0.2 } } } } }";
  const TwoStacks plain(text), recomputing(text, {"train.recompute=true"});
  const Batch source = source_batch(), target = target_batch();
  std::vector<std::vector<at::Tensor>> results;
  for (const TwoStacks* model : {&plain, &recomputing}) {
    const NoiseKey noise = make_noise(target);
    const at::Tensor out = model->decode(target, model->encode(source, noise), noise);
    (out * out.detach().cos()).sum().backward();
    results.push_back({out.detach()});
    for (const Parameter& parameter : model->parameters.list()) {
      ASSERT_TRUE(parameter.value.grad().defined()) << parameter.name;
      results.back().push_back(parameter.value.grad());
    }
  }
  for (std::size_t i = 0; i < results[0].size(); ++i) {
    EXPECT_TRUE(at::equal(results[0][i], results[1][i]))
        << (i == 0 ? "outputs" : plain.parameters.list()[i - 1].name);
  }
}

// An encoder that a decoder reads draws other noise than a stack of its own with equal parameters,
// so the two stacks of a model never share noise.
TEST(CrossAttention, StacksHaveNoiseOfTheirOwn) {
  const std::string attention = "attention { group { mechanism { dense { dropout: 0.5 } } } } ";
  for (const std::string& dropout :
       {std::string("dropout { embedding: 0.5 }"), std::string("dropout { residual: 0.5 }"),
        std::string("dropout { activation: 0.5 }"), attention + "encoder { " + attention + "}"}) {
    const TwoStacks model(dropout);
    const at::NoGradGuard no_grad;
    Parameters parameters = make_parameters(model.config, at::kCPU);
    const TokenStack single(model.config, StackRole::kEncoder, parameters);
    for (const Parameter& parameter : parameters.list()) {
      parameter.value.detach().copy_(model.at("encoder." + parameter.name));
    }
    const Batch batch = source_batch();
    const NoiseKey noise = make_noise(batch);
    NamedSums sums;
    EXPECT_TRUE(at::equal(single.forward(batch, {}, sums), model.encode(batch).x_BSC));
    EXPECT_FALSE(at::equal(single.forward(batch, noise, sums), model.encode(batch, noise).x_BSC))
        << dropout;
    EXPECT_TRUE(at::equal(model.encode(batch, noise).x_BSC, model.encode(batch, noise).x_BSC));
  }
}

TEST(CrossAttention, DecodingEqualsTheForwardPassAndRowsMove) {
  const TwoStacks model(
      "attention { group { mechanism { dense {} } } } attention { group { mechanism { sinkhorn { "
      "block: 2 } } } }");
  const at::NoGradGuard no_grad;
  const Batch source = source_batch(), target = target_batch();
  const Memory memory = model.encode(source);
  const at::Tensor expected = model.decode(target, memory);
  const auto cache = model.decoder.stack.decode_cache(2, memory);
  const at::Tensor& tokens = target.at("inputs");
  constexpr std::int64_t kMoved = 6;
  for (std::int64_t t = 0; t < kMoved; ++t) {
    const at::Tensor step = model.decoder.decode_step(*cache, tokens.select(1, t));
    EXPECT_LE(greatest_difference(step.squeeze(1), expected.select(1, t)), 1e-11) << t;
  }
  // Rows 1, 0, 1 continue, each with its own source.
  const at::Tensor rows = at::tensor({1, 0, 1}, at::kLong);
  cache->select_rows(rows);
  for (std::int64_t t = kMoved; t < kTarget; ++t) {
    const at::Tensor step =
        model.decoder.decode_step(*cache, tokens.select(1, t).index_select(0, rows));
    EXPECT_LE(greatest_difference(step.squeeze(1), expected.select(1, t).index_select(0, rows)),
              1e-11)
        << t;
  }
}

TEST(CrossAttention, MechanismsOfOneSequenceAreRefusedWithTheirPath) {
  try {
    const TwoStacks model(
        "encoder { cross_attention { group { heads: 1 } group { mechanism { block_local {} } } } }");
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kConfig);
    EXPECT_THAT(error.what(), ::testing::HasSubstr(
                                  "model.encoder.cross_attention.0.group.1.mechanism: it attends "
                                  "within one sequence"));
  }
}

}  // namespace
}  // namespace birkhoff
