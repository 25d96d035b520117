#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "cluster/base/error.h"
#include "configs/schema/config.pb.h"
#include "model_fixture.h"
#include "models/describe.h"
#include "models/embeddings/token_embedding.h"
#include "models/transformer/layers.h"
#include "runtime/tasks/task.h"
#include "tests/peak_memory.h"
#include "tests/sanitized.h"

namespace birkhoff {
namespace {

using testing::HasSubstr;

// Two entries. Both mix two mechanisms; in the second, the Sinkhorn head's values are its keys.
const std::string kMixed =
    "bias: true "
    "attention { group { heads: 1 mechanism { block_local { block: 4 look_back: 1 } } }"
    "            group { mechanism { dense {} } } } "
    "attention { group { heads: 1 mechanism { sinkhorn { block: 4 tie_key_value: true } } }"
    "            group { mechanism { dense {} } } }";
// Two heads whose queries share a key head.
const std::string kGrouped =
    "attention { group { key_heads: 1 mechanism { sink: true block_local { block: 4 look_back: 1 } "
    "                    relative_positions { max_distance: 5 } } } } "
    "attention { group { key_heads: 1 mechanism { "
    "                    routing { clusters: 2 share_query_key: false } } } }";

std::string message_of(const std::function<void()>& action, ExitCode* code = nullptr) {
  try {
    action();
  } catch (const Error& error) {
    if (code) *code = error.code();
    return error.what();
  }
  return "no error";
}

// 83 million logits, as WikiText-103 has in 311 tokens: 333 MB in fp32, and as much again for their
// log-softmax. Neither evaluation nor training holds them all.
TEST(LanguageModel, ManyIdsNeedFewLogitsAtATime) {
  constexpr std::int64_t kManyIds = 100000;
  const auto model = make_model(
      parse_config("task { language_model {} } data { corpus: 'none' sequence_length: 16 } "
                   "model { layers: 1 channels: 8 heads: 2 }",
                   "test", {}),
      kManyIds, at::kCPU);
  enlarge_parameters(*model);
  Batch batch = make_batch(52, 16);
  batch.fields["targets"] = batch.fields["targets"] * 9091;
  batch.fields["mask"] = batch.fields["targets"].remainder(3).ne(0).to(at::kByte);
  const auto gradients = [&](const std::function<void()>& backward) {
    for (const Parameter& p : model->parameters().list()) {
      at::Tensor value = p.value;
      value.mutable_grad() = at::Tensor();
    }
    backward();
    std::vector<at::Tensor> result;
    for (const Parameter& p : model->parameters().list()) result.push_back(p.value.grad());
    return result;
  };
  LossSums whole, evaluated;
  std::int64_t before = peak_memory(/*reset=*/true);
  const auto all = gradients([&] {
    whole = model->loss_sums(batch, std::nullopt);
    whole.loss.backward();
  });
  if (!kSanitized) {
    EXPECT_LT(peak_memory(/*reset=*/false) - before, 600 << 20);
  }
  {
    const at::NoGradGuard no_grad;
    before = peak_memory(/*reset=*/true);
    evaluated = model->loss_sums(batch, std::nullopt);
    if (!kSanitized) {
      EXPECT_LT(peak_memory(/*reset=*/false) - before, 600 << 20);
    }
  }
  EXPECT_EQ(evaluated.count.item<double>(), whole.count.item<double>());
  EXPECT_NEAR(evaluated.nats.item<double>(), whole.nats.item<double>(),
              1e-6 * whole.nats.item<double>());
  EXPECT_NEAR(evaluated.loss.item<double>(), whole.loss.item<double>(),
              1e-6 * whole.loss.item<double>());
  // Of a half all logits are computed together.
  const auto parts = gradients([&] {
    for (const std::int64_t begin : {0, 26}) {
      model->loss_sums(batch.narrow(begin, begin + 26), std::nullopt).loss.backward();
    }
  });
  for (std::size_t i = 0; i < all.size(); ++i) {
    EXPECT_LE(greatest_difference(all[i], parts[i]), 1e-5 * parts[i].abs().max().item<double>())
        << model->parameters().list()[i].name;
  }
}

TEST(LanguageModel, NamesShapesAndCountsOfParameters) {
  const TestModel model = make_test_model("positions: learned tie_embeddings: false bias: true");
  std::vector<std::string> rows;
  for (const Parameter& p : model->parameters().list()) {
    std::string row = p.name;
    for (const std::int64_t size : p.value.sizes()) row += " " + std::to_string(size);
    rows.push_back(row + (p.decay ? " decay" : ""));
  }
  std::vector<std::string> expected = {"embedding.weight 11 8 decay",
                                       "positions.weight 16 8 decay"};
  for (const std::string block : {"blocks.0.", "blocks.1."}) {
    for (const char* row :
         {"attention_norm.weight 8", "attention_norm.bias 8",
          "attention.query_key_value.weight 24 8 decay", "attention.query_key_value.bias 24",
          "attention.output.weight 8 8 decay", "attention.output.bias 8",
          "feed_forward_norm.weight 8", "feed_forward_norm.bias 8",
          "feed_forward.up.weight 32 8 decay", "feed_forward.up.bias 32",
          "feed_forward.down.weight 8 32 decay", "feed_forward.down.bias 8"}) {
      expected.push_back(block + row);
    }
  }
  expected.insert(expected.end(),
                  {"final_norm.weight 8", "final_norm.bias 8", "output.weight 11 8 decay"});
  EXPECT_EQ(rows, expected);
}

TEST(LanguageModel, PartsAddUpToTheHandCount) {
  const TestModel model = make_test_model("");
  std::vector<std::pair<std::string, std::int64_t>> parts;
  for (const ModelPart& part : model_parts(*model.model)) {
    parts.emplace_back(part.name, part.num_parameters);
  }
  const std::vector<std::pair<std::string, std::int64_t>> expected = {
      {"embedding", 88},
      {"positions", 128},
      {"blocks.0.attention_norm", 8},
      {"blocks.0.attention", 256},
      {"blocks.0.feed_forward_norm", 8},
      {"blocks.0.feed_forward", 512},
      {"blocks.1.attention_norm", 8},
      {"blocks.1.attention", 256},
      {"blocks.1.feed_forward_norm", 8},
      {"blocks.1.feed_forward", 512},
      {"final_norm", 8}};
  EXPECT_EQ(parts, expected);
  EXPECT_EQ(model->parameters().num_elements(), 1792);
  EXPECT_THAT(describe_model(*model.model, 16), HasSubstr("1792"));
  const TestModel grouped = make_test_model(kGrouped);
  EXPECT_THAT(describe_model(*grouped.model, 16),
              HasSubstr("\nblocks.1.attention.groups.0.centroids\n  head 0: moving averages of the "
                        "rows in a step 1, 1 (they start at 1)"));
}

TEST(LanguageModel, FlopsEqualTheHandCount) {
  // Each layer: matrices 8 x (24 + 8 + 32 + 32) = 768; pairs of causal attention 16 * 17 / 2 = 136,
  // each 2 * 2 * 8. Output layer: 11 * 8. All times two for multiply and add.
  const double expected = 2 * (2.0 * 16 * 768 + 4.0 * 136 * 8) + 2.0 * 16 * 88;
  EXPECT_EQ(make_test_model("")->forward_flops_per_sequence(), expected);
  EXPECT_EQ(make_test_model("tie_embeddings: false")->forward_flops_per_sequence(), expected);
}

TEST(LanguageModel, ShapesOfShorterAndFullSequences) {
  const TestModel model = make_test_model("positions: sinusoidal activation: relu");
  for (const std::int64_t tokens : {1, 5, 16}) {
    EXPECT_EQ(model->logits(make_batch(3, tokens), std::nullopt).sizes(),
              (std::vector<std::int64_t>{3, tokens, kVocabulary}));
  }
  ExitCode code{};
  EXPECT_THAT(message_of([&] { model->logits(make_batch(1, 17), std::nullopt); }, &code),
              HasSubstr("17 tokens is longer than data.sequence_length = 16"));
  EXPECT_EQ(code, ExitCode::kData);
}

TEST(LanguageModel, FreshModelIsNearlyUniform) {
  const TestModel model = make_test_model("");
  const LossSums sums = model->loss_sums(make_batch(4, 16), std::nullopt);
  EXPECT_NEAR(sums.nats.item<double>() / sums.count.item<double>(), std::log(kVocabulary), 0.02);
}

// The gradient of the tied table is the sum of the gradients of the embedding and the output layer
// of an untied twin.
TEST(LanguageModel, TiedEmbeddingsShareStorageAndGradient) {
  const TestModel tied = make_test_model(""), untied = make_test_model("tie_embeddings: false");
  EXPECT_FALSE(parameter_of(*tied.model, "output.weight").defined());
  enlarge_parameters(*tied.model);
  for (const Parameter& p : untied->parameters().list()) {
    const std::string twin = p.name == "output.weight" ? "embedding.weight" : p.name;
    p.value.detach().copy_(parameter_of(*tied.model, twin).detach());
  }
  const Batch batch = make_batch(2, 16);
  tied->loss_sums(batch, std::nullopt).loss.backward();
  untied->loss_sums(batch, std::nullopt).loss.backward();
  const at::Tensor sum = parameter_of(*untied.model, "embedding.weight").grad() +
                         parameter_of(*untied.model, "output.weight").grad();
  EXPECT_LT(greatest_difference(parameter_of(*tied.model, "embedding.weight").grad(), sum), 1e-12);
  EXPECT_GT(parameter_of(*untied.model, "output.weight").grad().abs().max().item<double>(), 1e-3);
}

TEST(LanguageModel, ScaledEmbeddingsEqualALargerTable) {
  const TestModel plain = make_test_model("tie_embeddings: false");
  const TestModel scaled = make_test_model("tie_embeddings: false scale_embeddings: true");
  parameter_of(*plain.model, "embedding.weight").detach().mul_(std::sqrt(8.0));
  const Batch batch = make_batch(2, 16);
  EXPECT_LT(
      greatest_difference(plain->logits(batch, std::nullopt), scaled->logits(batch, std::nullopt)),
      1e-12);
}

TEST(LanguageModel, OutputsDoNotDependOnLaterTokensWithMixedHeads) {
  const TestModel model = make_test_model(kMixed);
  enlarge_parameters(*model.model);
  EXPECT_TRUE(model->warnings().empty());
  const Batch batch = make_batch(2, 16);
  const at::Tensor before = model->logits(batch, std::nullopt);
  for (std::int64_t t = 0; t < 16; ++t) {
    Batch changed = batch;
    changed.fields["inputs"] = batch.at("inputs").clone();
    changed.fields["inputs"].narrow(1, t, 16 - t).add_(3).remainder_(kVocabulary);
    const at::Tensor after = model->logits(changed, std::nullopt);
    EXPECT_TRUE(at::equal(before.narrow(1, 0, t), after.narrow(1, 0, t))) << "t=" << t;
    EXPECT_GT(greatest_difference(before.select(1, t), after.select(1, t)), 1e-6) << "t=" << t;
  }
}

TEST(LanguageModel, DecodingEqualsTheForwardPass) {
  struct Precision {
    std::string setting;
    double tolerance;
  };
  for (const Precision& precision :
       {Precision{"train.precision=fp64", 1e-12}, Precision{"train.precision=fp32", 1e-5}}) {
    for (const std::string& text :
         {std::string("positions: learned"), std::string("positions: sinusoidal"),
          "positions: no_positions scale_embeddings: true " + kMixed, kGrouped,
          std::string("embedding_channels: 3"), std::string("positions: relative_sinusoidal"),
          std::string("adaptive_softmax { cutoff: [3, 7] divisor: 2 tie_projections: true }")}) {
      const TestModel model = make_test_model(text, {precision.setting});
      const Batch batch = make_batch(3, 16);
      const at::Tensor logits_BTV = model->logits(batch, std::nullopt);
      const auto cache = model->decode_cache(3);
      for (std::int64_t t = 0; t < 16; ++t) {
        const at::Tensor next_BV = model->decode_step(*cache, batch.at("inputs").select(1, t));
        EXPECT_FALSE(next_BV.requires_grad());
        EXPECT_LE(greatest_difference(logits_BTV.select(1, t), next_BV), precision.tolerance)
            << text << " t=" << t;
      }
      EXPECT_THAT(message_of([&] { model->decode_step(*cache, batch.at("inputs").select(1, 0)); }),
                  HasSubstr("max_tokens"));
    }
  }
}

TEST(LanguageModel, PackedDocumentsEqualTheDocumentsAlone) {
  for (const std::string text :
       {"positions: learned", "positions: sinusoidal", "positions: relative_sinusoidal"}) {
    const TestModel model = make_test_model(text, {"data.restart_at_documents=true"});
    enlarge_parameters(*model.model);
    const Batch first = make_batch(2, 5, 1), second = make_batch(2, 11, 7);
    Batch packed;
    for (const char* name : {"inputs", "targets", "mask"}) {
      packed.fields[name] = at::cat({first.at(name), second.at(name)}, 1);
    }
    packed.fields["segments"] =
        at::cat({at::zeros({2, 5}, at::kInt), at::ones({2, 11}, at::kInt)}, 1);
    packed.fields["positions"] =
        at::cat({at::arange(5, at::kLong), at::arange(11, at::kLong)}).expand({2, 16});
    packed.sample_ids_B = first.sample_ids_B;
    const at::Tensor alone =
        at::cat({model->logits(first, std::nullopt), model->logits(second, std::nullopt)}, 1);
    EXPECT_LT(greatest_difference(model->logits(packed, std::nullopt), alone), 1e-12) << text;
    packed.fields.erase("segments");
    EXPECT_GT(greatest_difference(model->logits(packed, std::nullopt), alone), 1e-3) << text;
  }
}

// Central differences along one direction of each parameter.
TEST(LanguageModel, GradientsEqualFiniteDifferences) {
  for (const std::string& text :
       {std::string("bias: true tie_embeddings: false"),
        "positions: sinusoidal activation: relu scale_embeddings: true " + kMixed,
        "activation: geglu embedding_channels: 5 " + kGrouped,
        std::string("positions: relative_sinusoidal norm: post attention { group { mechanism { "
                    "dense { normalizer: top_k kept_keys: 5 } } } }"),
        std::string("bias: true adaptive_softmax { cutoff: [3, 7] divisor: 2 } scale_embeddings: "
                    "true")}) {
    const TestModel model = make_test_model(text);
    enlarge_parameters(*model.model);
    Batch batch = make_batch(2, 16);
    batch.fields["mask"].select(1, 3).zero_();
    model->loss_sums(batch, std::nullopt).loss.backward();
    for (const Parameter& p : model->parameters().list()) {
      const at::Tensor direction =
          at::arange(p.value.numel(), at::kDouble).add(0.3).mul(2.3).sin().view(p.value.sizes());
      const at::Tensor value = p.value.detach();
      const at::Tensor start = value.clone();
      constexpr double kStep = 1e-5;
      const auto loss_at = [&](double distance) {
        value.copy_(start + distance * direction);
        return model->loss_sums(batch, std::nullopt).loss.item<double>();
      };
      const double numeric = (loss_at(kStep) - loss_at(-kStep)) / (2 * kStep);
      value.copy_(start);
      const double analytic = (p.value.grad() * direction).sum().item<double>();
      EXPECT_NEAR(numeric, analytic, 1e-6 * (1 + std::abs(analytic))) << p.name;
    }
  }
}

TEST(LanguageModel, FactorisedEmbeddingsProjectBothWays) {
  for (const bool tied : {false, true}) {
    const TestModel model = make_test_model("embedding_channels: 3 bias: true tie_embeddings: " +
                                            std::string(tied ? "true" : "false"));
    EXPECT_EQ(parameter_of(*model.model, "embedding.weight").size(1), 3);
    EXPECT_EQ(parameter_of(*model.model, "embedding.up.weight").sizes(), at::IntArrayRef({8, 3}));
    EXPECT_EQ(parameter_of(*model.model, "output.down.weight").sizes(), at::IntArrayRef({3, 8}));
    // Logits are products of three numbers: a table of rank 3 whatever the channels.
    const at::Tensor logits_NV =
        model->logits(make_batch(3, 16), std::nullopt).flatten(0, 1).detach();
    const at::Tensor singular = std::get<1>(at::linalg_svd(logits_NV, /*full_matrices=*/false));
    EXPECT_GT(singular[2].item<double>(), 1e-9);
    EXPECT_LT(singular[3].item<double>(), 1e-12);
  }
  const TestModel plain = make_test_model(""), same = make_test_model("embedding_channels: 8");
  EXPECT_EQ(plain->parameters().num_elements(), same->parameters().num_elements());
}

// gelu(x W) times x V, where W and V are the halves of one matrix.
TEST(FeedForward, GegluIsItsFormula) {
  const configs::Config config = parse_config(
      "task { language_model {} } data { corpus: 'none' } model { channels: 8 heads: 2 "
      "feed_forward: 5 activation: geglu bias: true }",
      "test", {});
  Parameters parameters(3, at::kDouble);
  const FeedForward layer(config.model(), "ff", parameters);
  const auto parameter = [&](std::size_t i) { return parameters.list().at(i).value; };
  EXPECT_EQ(parameter(0).sizes(), at::IntArrayRef({10, 8}));
  EXPECT_EQ(parameter(2).sizes(), at::IntArrayRef({8, 5}));
  const at::Tensor x_BTC = at::randn({2, 3, 8}, at::kDouble);
  const at::Tensor up = at::matmul(x_BTC, parameter(0).t()) + parameter(1);
  const at::Tensor hidden = at::gelu(up.narrow(2, 0, 5)) * up.narrow(2, 5, 5);
  EXPECT_LE(greatest_difference(layer(x_BTC, {}, std::nullopt),
                                at::matmul(hidden, parameter(2).t()) + parameter(3)),
            1e-14);
}

TEST(LanguageModel, LayersFollowThePatternAndTiedHeadsHaveNoValues) {
  const TestModel model = make_test_model(kMixed, {"model.layers=4"});
  // 8 query and 8 key channels; values of both heads in entry 0, but only of the dense head in
  // entry 1.
  for (const auto& [layer, outputs] : {std::pair{0, 24}, {1, 20}, {2, 24}, {3, 20}}) {
    const std::string name = "blocks." + std::to_string(layer) + ".attention.";
    EXPECT_EQ(parameter_of(*model.model, name + "query_key_value.weight").size(0), outputs);
  }
}

// A head's output does not depend on how heads are grouped.
TEST(LanguageModel, GroupsOfOneMechanismEqualOneGroup) {
  const TestModel one = make_test_model("");
  const TestModel two = make_test_model(
      "attention { group { heads: 1 mechanism { dense {} } } group { mechanism { dense {} } } }");
  enlarge_parameters(*one.model);
  enlarge_parameters(*two.model);
  const Batch batch = make_batch(2, 16);
  EXPECT_LT(greatest_difference(one->logits(batch, std::nullopt), two->logits(batch, std::nullopt)),
            1e-12);
}

TEST(LanguageModel, InitialScales) {
  const auto deviation = [](const TestModel& model, const std::string& name) {
    return parameter_of(*model.model, name).std().item<double>();
  };
  const std::vector<std::string> large = {"model.channels=64", "model.layers=2"};
  const TestModel normal = make_test_model("init: normal", large);
  EXPECT_NEAR(deviation(normal, "blocks.0.feed_forward.up.weight"), 0.02, 5e-4);
  EXPECT_NEAR(deviation(normal, "blocks.0.feed_forward.down.weight"), 0.01, 3e-4);
  EXPECT_NEAR(deviation(normal, "blocks.1.attention.output.weight"), 0.01, 5e-4);
  const TestModel uniform = make_test_model("init: uniform_unit_scaling", large);
  EXPECT_NEAR(deviation(uniform, "blocks.0.feed_forward.down.weight"), 1 / 16.0, 1e-3);
  EXPECT_NEAR(deviation(uniform, "embedding.weight"), 1 / 8.0, 0.01);
}

TEST(LanguageModel, BadConfigurationsNameTheField) {
  const auto refused = [&](const std::function<void(configs::Config&)>& change) {
    configs::Config config = parse_config(
        "task { language_model {} } data { corpus: 'none' } model { channels: 8 heads: 2 }", "test",
        {});
    change(config);
    ExitCode code{};
    const std::string message =
        message_of([&] { make_model(config, kVocabulary, at::kCPU); }, &code);
    EXPECT_EQ(code, ExitCode::kConfig) << message;
    return message;
  };
  EXPECT_THAT(refused([](auto& c) {
                c.mutable_model()
                    ->mutable_attention(0)
                    ->mutable_group(0)
                    ->mutable_mechanism()
                    ->mutable_dense()
                    ->set_dropout(1);
              }),
              HasSubstr("dense.dropout: must be in [0, 1), is 1"));
  const auto group_of = [](configs::Config& c) -> configs::HeadGroup& {
    return *c.mutable_model()->mutable_attention(0)->mutable_group(0);
  };
  EXPECT_THAT(refused([&](auto& c) {
                group_of(c).set_key_heads(1);
                group_of(c).mutable_mechanism()->mutable_routing();
              }),
              HasSubstr("share_query_key: true needs as many key heads as heads"));
  EXPECT_THAT(refused([&](auto& c) {
                group_of(c).mutable_mechanism()->mutable_relative_positions()->set_max_distance(4);
              }),
              HasSubstr("relative_positions: not supported by this mechanism"));
  EXPECT_THAT(refused([&](auto& c) {
                c.mutable_task()->mutable_classification();
                group_of(c).mutable_mechanism()->mutable_sinkformer();
                group_of(c).mutable_mechanism()->set_sink(true);
              }),
              HasSubstr("sink: not supported by this mechanism"));
  EXPECT_THAT(refused([](auto& c) { c.mutable_task()->Clear(); }), HasSubstr("no task is set"));
}

TEST(Sinusoid, ValuesOfTheLayout) {
  const at::Tensor table = sinusoid_table(3, 4);  // wavelengths 1 and 10,000
  const at::Tensor expected =
      at::tensor({0.0, 0.0, 1.0, 1.0, std::sin(1.0), std::sin(1e-4), std::cos(1.0), std::cos(1e-4),
                  std::sin(2.0), std::sin(2e-4), std::cos(2.0), std::cos(2e-4)},
                 at::kDouble)
          .view({3, 4});
  EXPECT_LT(greatest_difference(table, expected), 1e-15);
}

}  // namespace
}  // namespace birkhoff
