// Adaptive softmax and adaptive embeddings against their definitions in fp64.
//
// Legend: N tokens, C channels, V vocabulary.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <map>

#include "cluster/base/error.h"
#include "models/embeddings/vocabulary_parts.h"
#include "models/output_layer.h"
#include "tests/models/model_fixture.h"

namespace birkhoff {
namespace {

using testing::HasSubstr;

constexpr std::int64_t kWidth = 8;
const std::vector<std::int64_t> kEdges{0, 3, 7, kVocabulary};  // of the parts of [3, 7]

// Embedding, stack and output layer of a model.
struct Layers {
  explicit Layers(const std::string& model, const std::string& precision = "fp64")
      : config(parse_config("task { language_model {} } data { corpus: 'none' sequence_length: 16 "
                            "} train { precision: " +
                                precision +
                                " } model { layers: 1 channels: 8 heads: 2 positions: "
                                "no_positions " +
                                model + " }",
                            "test", {})),
        parameters(make_parameters(config, at::kCPU)),
        embedding(config, StackRole::kDecoder, kVocabulary, parameters),
        stack(config, StackRole::kDecoder, parameters),
        output(config.model(), kVocabulary, embedding, stack, parameters) {
    for (const Parameter& p : parameters.list()) {  // biases, too
      const at::Tensor n = at::arange(p.value.numel(), p.value.options());
      p.value.detach().copy_(
          n.mul(1.3).add(static_cast<double>(p.name.size())).sin().mul(0.3).view(p.value.sizes()));
    }
  }
  at::Tensor parameter(const std::string& name) const {
    for (const Parameter& p : parameters.list()) {
      if (p.name == name) return p.value;
    }
    return {};
  }

  configs::Config config;
  Parameters parameters;
  TokenEmbedding embedding;
  Stack stack;
  OutputLayer output;
};

std::string of_part(std::size_t i, const std::string& layer) {
  return layer + (i == 0 ? "" : ".tails." + std::to_string(i - 1));
}

// The definition: log p(v) is that of the head's softmax, for a tail's id that of the tail and of
// the id in the tail. [N, V]
at::Tensor log_probabilities(const Layers& layers, const at::Tensor& x_NC) {
  const auto& model = layers.config.model();
  const auto logits = [&](std::size_t i) {
    at::Tensor x = x_NC;
    const at::Tensor down = layers.parameter(of_part(i, "output") + ".down.weight"),
                     bias = layers.parameter(of_part(i, "output") + ".down.bias");
    if (model.adaptive_softmax().tie_projections() && i > 0) {
      x = at::matmul(x, layers.parameter(of_part(i, "embedding") + ".up.weight"));
    } else if (down.defined()) {
      x = at::matmul(x, down.t());
    }
    if (bias.defined()) x = x + bias;
    const std::string table = model.tie_embeddings() ? "embedding" : "output";
    return at::matmul(x, layers.parameter(of_part(i, table) + ".weight").t());
  };
  const at::Tensor tails = at::matmul(x_NC, layers.parameter("output.tail_logits.weight").t());
  const at::Tensor head = at::cat({logits(0), tails}, 1);
  const at::Tensor log_sum = head.exp().sum(1, /*keepdim=*/true).log();
  std::vector<at::Tensor> all{head.narrow(1, 0, kEdges[1]) - log_sum};
  for (std::size_t i = 1; i + 1 < kEdges.size(); ++i) {
    const at::Tensor tail = logits(i);
    all.push_back(head.narrow(1, kEdges[1] + static_cast<std::int64_t>(i) - 1, 1) - log_sum + tail -
                  tail.exp().sum(1, true).log());
  }
  return at::cat(all, 1);
}

const std::vector<std::string>& variants() {
  static const std::vector<std::string> all = {
      "adaptive_softmax { cutoff: [3, 7] divisor: 2 }",
      "adaptive_softmax { cutoff: [3, 7] divisor: 2 tie_projections: true } bias: true",
      "adaptive_softmax { cutoff: [3, 7] divisor: 2 } tie_embeddings: false bias: true",
      "adaptive_softmax { cutoff: [3, 7] divisor: 2 inputs: false } tie_embeddings: false",
      "adaptive_softmax { cutoff: [3, 7] divisor: 1 }"};
  return all;
}

TEST(AdaptiveSoftmax, EqualsItsDefinition) {
  // Targets in all parts, in the head and one tail, in the other tail only, and ones that do not
  // count.
  const std::vector<at::Tensor> targets{
      at::arange(12, at::kLong).remainder(kVocabulary), at::arange(12, at::kLong).remainder(7),
      at::full({12}, 9, at::kLong), at::arange(12, at::kLong).mul(97)};
  for (const std::string& variant : variants()) {
    const Layers layers(variant);
    for (std::size_t t = 0; t < targets.size(); ++t) {
      SCOPED_TRACE(variant + " targets " + std::to_string(t));
      at::Tensor mask_BT = at::arange(12).remainder(5).ne(2).to(at::kByte).view({2, 6});
      if (t == 3) mask_BT.zero_();
      const at::Tensor x_BTC = at::arange(12 * kWidth, at::kDouble)
                                   .mul(0.7)
                                   .sin()
                                   .view({2, 6, kWidth})
                                   .requires_grad_(true);
      std::vector<at::Tensor> leaves{x_BTC};
      for (const Parameter& p : layers.parameters.list()) leaves.push_back(p.value);
      const at::Tensor log_p_NV = log_probabilities(layers, x_BTC.flatten(0, 1));
      EXPECT_LE(greatest_difference(log_p_NV.exp().sum(1), at::ones({12}, at::kDouble)), 1e-12);
      EXPECT_LE(greatest_difference(layers.output.logits(x_BTC, {}).flatten(0, 1), log_p_NV),
                1e-12);
      const at::Tensor counted_N = mask_BT.flatten().ne(0);
      const at::Tensor expected_N =
          -log_p_NV.gather(1, targets[t].masked_fill(counted_N.logical_not(), 0).unsqueeze(1))
               .squeeze(1)
               .masked_fill(counted_N.logical_not(), 0);
      const at::Tensor expected = expected_N.sum();
      const LossSums sums = layers.output.loss(x_BTC, {}, targets[t].view({2, 6}), mask_BT).sums;
      EXPECT_NEAR(sums.loss.item<double>(), expected.item<double>(), 1e-10);
      EXPECT_NEAR(sums.nats.item<double>(), expected.item<double>(), 1e-10);
      EXPECT_EQ(sums.count.item<double>(), counted_N.sum().item<double>());
      {
        const at::NoGradGuard no_gradients;
        const LossSums evaluated =
            layers.output.loss(x_BTC, {}, targets[t].view({2, 6}), mask_BT).sums;
        EXPECT_NEAR(evaluated.nats.item<double>(), expected.item<double>(), 1e-10);
        EXPECT_LE(greatest_difference(evaluated.nats_N, expected_N), 1e-10);
      }
      const auto gradients = [&](const at::Tensor& loss) {
        return torch::autograd::grad({loss}, leaves, {}, /*retain_graph=*/true,
                                     /*create_graph=*/false, /*allow_unused=*/true);
      };
      const auto found = gradients(sums.loss), direct = gradients(expected);
      for (std::size_t i = 0; i < leaves.size(); ++i) {
        const std::string name = i == 0 ? "x" : layers.parameters.list()[i - 1].name;
        // Of every parameter of the output layer, also of a tail without tokens.
        EXPECT_EQ(found[i].defined(), direct[i].defined()) << name;
        if (direct[i].defined()) {
          EXPECT_LE(greatest_difference(found[i], direct[i]), 1e-10) << name;
        }
      }
    }
  }
}

TEST(AdaptiveSoftmax, EmbeddingsAreProjectedRowsOfTheirTable) {
  const Layers layers(variants()[2] + " scale_embeddings: true");
  const Batch batch = make_batch(2, 16);
  const at::Tensor x_BTC = layers.embedding(batch, token_slices(batch, layers.parameters), {});
  for (std::int64_t b = 0; b < 2; ++b) {
    for (std::int64_t t = 0; t < 16; ++t) {
      const auto id = batch.at("inputs")[b][t].item<std::int64_t>();
      const std::size_t i = id < 3 ? 0 : id < 7 ? 1 : 2;
      const std::string name = of_part(i, "embedding");
      at::Tensor row = layers.parameter(name + ".weight")[id - kEdges[i]];
      if (i > 0) {
        row = at::matmul(layers.parameter(name + ".up.weight"), row) +
              layers.parameter(name + ".up.bias");
      }
      EXPECT_LE(greatest_difference(x_BTC[b][t], row * std::sqrt(8.0)), 1e-12) << id;
    }
  }
}

TEST(AdaptiveSoftmax, PartsHaveTheirWidths) {
  std::map<std::string, std::vector<std::int64_t>> shapes;
  const Layers tied(variants()[1]), untied(variants()[3]);
  for (const Parameter& p : tied.parameters.list()) shapes[p.name] = p.value.sizes().vec();
  EXPECT_EQ(shapes["embedding.weight"], (std::vector<std::int64_t>{3, 8}));
  EXPECT_EQ(shapes["embedding.tails.0.weight"], (std::vector<std::int64_t>{4, 4}));
  EXPECT_EQ(shapes["embedding.tails.1.weight"], (std::vector<std::int64_t>{4, 2}));
  EXPECT_EQ(shapes["embedding.tails.1.up.weight"], (std::vector<std::int64_t>{8, 2}));
  EXPECT_EQ(shapes["output.tail_logits.weight"], (std::vector<std::int64_t>{2, 8}));
  for (const auto& [name, shape] : shapes) {
    EXPECT_TRUE(!name.starts_with("output.") || name == "output.tail_logits.weight") << name;
  }
  EXPECT_EQ(untied.parameter("embedding.weight").sizes(), at::IntArrayRef({11, 8}));
  EXPECT_EQ(untied.parameter("output.weight").sizes(), at::IntArrayRef({3, 8}));
  EXPECT_EQ(untied.parameter("output.tails.0.down.weight").sizes(), at::IntArrayRef({4, 8}));
}

// Rounding to bf16 changes a value by at most 2^-9 of its magnitude. Values are at most 1, weights
// 0.3, so logits of the head are sums of at most 8 * 0.3 = 2.4, with three roundings (values, rows,
// logits), and those of tails of at most 4 * 2.4 * 0.3 = 2.9, with five. A log-probability has the
// errors of a logit and of the logarithm of a sum, in two softmaxes.
TEST(AdaptiveSoftmax, Bf16IsCloseToFp64) {
  const Layers exact(variants()[1]), rounded(variants()[1], "bf16");
  const at::Tensor x_BTC = at::arange(12 * kWidth, at::kDouble).mul(0.7).sin().view({2, 6, kWidth});
  const at::Tensor expected = exact.output.logits(x_BTC, {}),
                   found = rounded.output.logits(x_BTC.to(at::kBFloat16), {});
  EXPECT_EQ(found.scalar_type(), at::kFloat);
  EXPECT_LE(greatest_difference(found.to(at::kDouble), expected), 2 * (3 * 2.4 + 5 * 2.9) * 0x1p-9);
  const at::Tensor targets_BT = at::arange(12, at::kLong).remainder(kVocabulary).view({2, 6}),
                   mask_BT = at::ones({2, 6}, at::kByte);
  const LossSums sums = rounded.output.loss(x_BTC.to(at::kBFloat16), {}, targets_BT, mask_BT).sums;
  EXPECT_NEAR(sums.nats.item<double>(),
              -found.to(at::kDouble).gather(2, targets_BT.unsqueeze(2)).sum().item<double>(), 1e-4);
}

TEST(AdaptiveSoftmax, SharesOfZipfsLawAreThoseOfItsSamples) {
  const std::int64_t vocabulary = 1000, n = 20000;
  const at::Tensor uniform = (at::arange(n, at::kDouble) + 0.5) / static_cast<double>(n);
  const at::Tensor ids = zipf_ids(uniform, vocabulary);
  EXPECT_EQ(ids.min().item<std::int64_t>(), 0);
  EXPECT_EQ(ids.max().item<std::int64_t>(), vocabulary - 1);
  double sum = 0;
  for (const Interval& part : {Interval{0, 10}, Interval{10, 200}, Interval{200, 1000}}) {
    const double share = zipf_share(part, vocabulary);
    const at::Tensor inside = ids.ge(part.begin).logical_and(ids.lt(part.end));
    EXPECT_NEAR(inside.to(at::kDouble).mean().item<double>(), share, 2.0 / static_cast<double>(n));
    sum += share;
  }
  EXPECT_NEAR(sum, 1, 1e-12);
}

TEST(AdaptiveSoftmax, ACutoffBeyondTheVocabularyIsRefused) {
  for (const char* const last : {"11", "500"}) {
    try {
      make_test_model("adaptive_softmax { cutoff: [3, " + std::string(last) + "] divisor: 2 }");
      ADD_FAILURE() << last;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kConfig);
      EXPECT_THAT(error.what(), HasSubstr("model.adaptive_softmax.cutoff.1: " + std::string(last) +
                                          " leaves no ids for the last tail of a vocabulary of "
                                          "11;"));
    }
  }
}

TEST(AdaptiveSoftmax, FlopsCountTailsByTheirShare) {
  const TestModel plain = make_test_model(""),
                  parts = make_test_model("adaptive_softmax { cutoff: [3, 7] divisor: 2 }");
  const auto of_output = [](const TestModel& model) {
    // Layers as in FlopsEqualTheHandCount.
    return model->forward_flops_per_sequence() / 16 - 2 * (2.0 * 16 * 768 + 4.0 * 136 * 8) / 16;
  };
  EXPECT_NEAR(of_output(plain), 2.0 * 88, 1e-9);
  // Inputs 2 (4 8 + 2 8); the head 2 8 (3 + 2); tails 2 (8 E + E ids).
  const double expected = 96 + 80 + 2 * (8 * 4 + 4 * 4) * zipf_share({3, 7}, 11) +
                          2 * (8 * 2 + 2 * 4) * zipf_share({7, 11}, 11);
  EXPECT_NEAR(of_output(parts), expected, 1e-9);
}

}  // namespace
}  // namespace birkhoff
