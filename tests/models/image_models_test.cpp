// Pixel models and classifiers of images: their inputs, what each output sees, and what is refused.
//
// Legend: B batch, T tokens, C channels of the model, I values of a patch, D channels of an image.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>

#include "cluster/base/error.h"
#include "model_fixture.h"
#include "models/embeddings/patch_embedding.h"
#include "models/pixel_model.h"
#include "runtime/tasks/targets.h"

namespace birkhoff {
namespace {

// Images of 4 x 2 x 2 values.
constexpr ImageDims kShape{4, 2, 2};
constexpr std::int64_t kValues = 16;

configs::Config config_of(const std::string& task, const std::string& model,
                          const std::vector<std::string>& settings = {}) {
  return parse_config("task { " + task +
                          " } data { corpus: 'none' sequence_length: 16 } "
                          "train { precision: fp64 } model { layers: 2 channels: 8 heads: 2 " +
                          model + " }",
                      "test", settings);
}

std::unique_ptr<Model> make_image_model(const std::string& task, const std::string& model,
                                        const std::vector<std::string>& settings = {},
                                        const ImageDims& shape = kShape) {
  const auto of_config = make_task(config_of(task, model, settings));
  ModelInputs inputs = of_config->inputs(0);
  inputs.image = shape;
  auto made = of_config->make_model(inputs, at::kCPU);
  enlarge_parameters(*made);
  return made;
}

std::unique_ptr<Model> make_pixel_model(const std::string& model,
                                        const std::vector<std::string>& settings = {}) {
  return make_image_model("pixel_model {}", model, settings);
}

Batch make_images(std::int64_t batch, const ImageDims& shape = kShape, int seed = 3) {
  const at::Tensor place = at::arange(batch * shape.values(), at::kLong) + 1000 * seed;
  Batch images;
  images.fields["images"] = place.mul(40503)
                                .add(place.mul(place).mul(977))
                                .bitwise_right_shift(5)
                                .remainder(256)
                                .to(at::kByte)
                                .view({batch, shape.rows, shape.columns, shape.channels});
  images.fields["labels"] = at::arange(batch, at::kLong).remainder(3);
  images.sample_ids_B = at::arange(batch, at::kLong) + 100;
  return images;
}

LanguageModel& language_model(Model& model) {
  return dynamic_cast<PixelModel&>(model).language_model();
}

// The nats [T] of each value of an image.
std::vector<double> nats_of_values(Model& model, const Batch& image) {
  const Batch tokens = PixelModel::tokens_of(image);
  const at::Tensor log_p_TV = language_model(model).logits(tokens, std::nullopt)[0].log_softmax(-1);
  std::vector<double> nats;
  for (std::int64_t t = 0; t < kValues; ++t) {
    nats.push_back(-log_p_TV[t][tokens.at("targets")[0][t]].item<double>());
  }
  return nats;
}

Batch with_value(const Batch& batch, std::int64_t image, std::int64_t value, int add) {
  Batch changed = batch;
  changed.fields["images"] = batch.at("images").clone();
  changed.fields["images"][image].view({-1}).narrow(0, value, 1).add_(add);
  return changed;
}

const char* const kCausal[] = {
    "dense {}", "block_local { block: 4 look_back: 1 }",
    "sinkhorn { block: 4 causal_balance: prefix }",
    "routing { clusters: 2 window: 8 causal_selection: causal_bucket commitment: 0 }"};
std::string with_mechanism(const std::string& mechanism) {
  return "attention { group { mechanism { " + mechanism + " } } } ";
}

TEST(PixelModel, TokensAreTheBeginAndAllValuesButTheLast) {
  const Batch images = make_images(2);
  const Batch tokens = PixelModel::tokens_of(images);
  const at::Tensor values_BT = images.at("images").flatten(1).to(at::kLong);
  EXPECT_TRUE(tokens.at("targets").equal(values_BT));
  EXPECT_TRUE(
      tokens.at("inputs").narrow(1, 1, kValues - 1).equal(values_BT.narrow(1, 0, kValues - 1)));
  EXPECT_TRUE(tokens.at("inputs").select(1, 0).eq(kBeginToken).all().item<bool>());
  EXPECT_EQ(tokens.at("mask").sum().item<std::int64_t>(), 2 * kValues);
}

// Layers that add nothing: a value depends on the one before it only, with probabilities that are
// worked out here with loops.
TEST(PixelModel, BitsPerDimAreTheSumOfGivenProbabilities) {
  const auto model = make_pixel_model("positions: no_positions");
  for (const Parameter& p : model->parameters().list()) {
    if (p.name.ends_with("attention.output.weight") || p.name.ends_with("down.weight")) {
      p.value.detach().zero_();
    }
  }
  const auto rows_of = [&](const std::string& name) {
    return parameter_of(*model, name).detach().to(at::kDouble).contiguous();
  };
  const at::Tensor table_VC = rows_of("embedding.weight"), begin_C = rows_of("embedding.begin");
  const auto log2_p = [&](const double* before_C, std::int64_t value) {
    double mean = 0, variance = 0;
    for (int c = 0; c < 8; ++c) mean += before_C[c] / 8;
    for (int c = 0; c < 8; ++c) variance += (before_C[c] - mean) * (before_C[c] - mean) / 8;
    double sum = 0, logit = 0;
    for (std::int64_t v = 0; v < 256; ++v) {
      double dot = 0;
      for (int c = 0; c < 8; ++c) {
        dot += (before_C[c] - mean) / std::sqrt(variance + 1e-5) *
               table_VC.const_data_ptr<double>()[v * 8 + c];
      }
      sum += std::exp(dot);
      if (v == value) logit = dot;
    }
    return (logit - std::log(sum)) / std::log(2.0);
  };
  const Batch images = make_images(3);
  const auto* values = images.at("images").const_data_ptr<std::uint8_t>();
  double bits = 0;
  for (std::int64_t i = 0; i < 3 * kValues; ++i) {
    const double* before = i % kValues == 0 ? begin_C.const_data_ptr<double>()
                                            : table_VC.const_data_ptr<double>() + values[i - 1] * 8;
    bits -= log2_p(before, values[i]);
  }
  const LossSums sums = model->loss_sums(images, std::nullopt);
  EXPECT_EQ(sums.count.item<double>(), 3 * kValues);
  EXPECT_NEAR(sums.nats.item<double>() / std::log(2.0) / (3 * kValues), bits / (3 * kValues), 1e-6);
  EXPECT_GT(std::abs(bits / (3 * kValues) - 8), 0.01) << "the probabilities are not uniform";
}

TEST(PixelModel, AValueSeesNoLaterOneAndNoOtherImage) {
  for (const char* mechanism : kCausal) {
    SCOPED_TRACE(mechanism);
    const auto model = make_pixel_model(with_mechanism(mechanism) + "positions: learned");
    const Batch images = make_images(2), first = images.narrow(0, 1);
    const std::vector<double> before = nats_of_values(*model, first);
    for (const std::int64_t changed : {0, 5, 15}) {
      const std::vector<double> after = nats_of_values(*model, with_value(first, 0, changed, 7));
      for (std::int64_t t = 0; t < changed; ++t) {
        const auto i = static_cast<std::size_t>(t);
        EXPECT_NEAR(after[i], before[i], 1e-12) << "value " << t << " sees value " << changed;
      }
    }
    // The gradient of the loss of value i by what enters at position t.
    const at::Tensor positions_TC = parameter_of(*model, "positions.weight");
    for (const std::int64_t i : {0, 6, 15}) {
      Batch tokens = PixelModel::tokens_of(first);
      tokens.fields["mask"].zero_().narrow(1, i, 1).fill_(1);
      const LossSums sums = language_model(*model).loss_sums(tokens, std::nullopt);
      const at::Tensor d_T = torch::autograd::grad({sums.loss}, {positions_TC})[0].abs().sum(1);
      EXPECT_GT(d_T[i].item<double>(), 0);
      for (std::int64_t t = i + 1; t < kValues; ++t) EXPECT_EQ(d_T[t].item<double>(), 0) << t;
    }
    // Another image in the batch.
    const auto nats = [&](const Batch& batch) {
      return model->loss_sums(batch, std::nullopt).nats.item<double>();
    };
    const double second = nats(images.narrow(1, 2));
    EXPECT_NEAR(nats(images) - nats(first), second, 1e-11);
    const Batch other = with_value(images, 0, 15, 9);
    EXPECT_NEAR(nats(other) - nats(other.narrow(0, 1)), second, 1e-11);
  }
}

// Decoding reads one value at a time, and embeds it at its position.
TEST(PixelModel, DecodesTheProbabilitiesOfTheLoss) {
  for (const std::string positions : {"learned", "image_axes", "sinusoidal"}) {
    for (const char* mechanism : kCausal) {
      SCOPED_TRACE(positions + " " + mechanism);
      const auto model = make_pixel_model(with_mechanism(mechanism) + "positions: " + positions);
      const Batch images = make_images(2);
      const Batch tokens = PixelModel::tokens_of(images);
      const at::Tensor logits_BTV = language_model(*model).logits(tokens, std::nullopt);
      const auto cache = model->decoder()->decode_cache(2);
      for (std::int64_t t = 0; t < kValues; ++t) {
        const at::Tensor logits_BV =
            model->decoder()->decode_step(*cache, tokens.at("inputs").select(1, t));
        EXPECT_LT(greatest_difference(logits_BV, logits_BTV.select(1, t)), 1e-10) << t;
      }
    }
  }
}

TEST(PixelModel, ImageAxesAreTheSumOfThreeTables) {
  const auto axes = make_pixel_model("positions: image_axes"),
             learned = make_pixel_model("positions: learned");
  const std::vector<std::pair<std::string, std::int64_t>> tables = {
      {"positions.rows.weight", 4},
      {"positions.columns.weight", 2},
      {"positions.channels.weight", 2}};
  for (const auto& [name, rows] : tables) {
    EXPECT_EQ(parameter_of(*axes, name).sizes(), (std::vector<std::int64_t>{rows, 8})) << name;
  }
  for (const Parameter& p : learned->parameters().list()) {
    if (p.name != "positions.weight") {
      p.value.detach().copy_(parameter_of(*axes, p.name));
      continue;
    }
    for (std::int64_t t = 0; t < kValues; ++t) {
      p.value.detach()[t].copy_(parameter_of(*axes, tables[0].first)[t / 4] +
                                parameter_of(*axes, tables[1].first)[t / 2 % 2] +
                                parameter_of(*axes, tables[2].first)[t % 2]);
    }
  }
  const Batch images = make_images(3);
  EXPECT_NEAR(axes->loss_sums(images, std::nullopt).nats.item<double>(),
              learned->loss_sums(images, std::nullopt).nats.item<double>(), 1e-10);
}

// ---- Classification.

constexpr char kMean[] = "image_classification { classes: 3 patch: 1 pooling: mean }";
constexpr ImageDims kGray{4, 4, 1};  // 16 patches of a pixel

at::Tensor log_probabilities(Model& model, const Batch& batch) {
  return model.classifier()->log_probabilities(batch);
}

TEST(PatchEmbedding, IsTheSumOfALoop) {
  const ImageDims shape{4, 6, 3};
  constexpr std::int64_t kSide = 2, kWidth = 8, kSequence = 7;
  const float mean[] = {0.5F, 0.25F, 0.125F}, std[] = {2, 0.5F, 0.75F};
  const configs::Config config = config_of(
      "image_classification { classes: 3 patch: 2 pixel_mean: [0.5, 0.25, 0.125] pixel_std: [2, 0.5, 0.75] }",
      "bias: true", {"data.sequence_length=7"});
  Parameters parameters = make_parameters(config, at::kCPU);
  const PatchEmbedding embedding(config, shape, parameters);
  std::map<std::string, at::Tensor> values;
  for (const Parameter& p : parameters.list()) {
    p.value.detach().normal_();  // biases begin as zeros
    values[p.name] = p.value.detach();
  }
  EXPECT_EQ(values.size(), 4U);
  const Batch batch = make_images(2, shape);
  const at::Tensor x_BTC = embedding(batch, embedding.slices(batch), std::nullopt);
  ASSERT_EQ(x_BTC.sizes(), (std::vector<std::int64_t>{2, kSequence, kWidth}));
  EXPECT_TRUE(embedding.lengths(batch).equal(at::full({2}, kSequence, at::kLong)));
  const at::Tensor weight = values.at("embedding.weight"), bias = values.at("embedding.bias"),
                   token = values.at("embedding.class_token"),
                   positions = values.at("positions.weight");
  for (std::int64_t b = 0; b < 2; ++b) {
    for (std::int64_t c = 0; c < kWidth; ++c) {
      EXPECT_NEAR(x_BTC[b][0][c].item<double>(), (token[c] + positions[0][c]).item<double>(),
                  1e-12);
      for (std::int64_t n = 0; n < kSequence - 1; ++n) {
        double sum = bias[c].item<double>() + positions[n + 1][c].item<double>();
        for (std::int64_t y = 0; y < kSide; ++y) {
          for (std::int64_t x = 0; x < kSide; ++x) {
            for (std::int64_t d = 0; d < 3; ++d) {
              const auto value =
                  batch.at("images")[b][n / 3 * 2 + y][n % 3 * 2 + x][d].item<double>();
              sum += weight[c][(y * kSide + x) * 3 + d].item<double>() * (value / 255 - mean[d]) /
                     std[d];
            }
          }
        }
        EXPECT_NEAR(x_BTC[b][n + 1][c].item<double>(), sum, 1e-12);
      }
    }
  }
}

TEST(ImageClassifier, WithoutPositionsTheOrderOfPatchesDoesNotMatter) {
  for (const char* mechanism : {"dense {}", "sinkformer { half_steps: 5 }"}) {
    for (const char* pooling : {"mean", "max"}) {
      SCOPED_TRACE(std::string(mechanism) + pooling);
      const auto make = [&](const std::string& positions) {
        return make_image_model(kMean, with_mechanism(mechanism) + "positions: " + positions,
                                {std::string("task.image_classification.pooling=") + pooling},
                                kGray);
      };
      const Batch images = make_images(2, kGray);
      Batch permuted = images;
      permuted.fields["images"] = images.at("images")
                                      .flatten(1, 2)
                                      .index_select(1, (at::arange(16) * 7 + 3).remainder(16))
                                      .view_as(images.at("images"));
      const auto free = make("no_positions"), bound = make("learned");
      EXPECT_LT(
          greatest_difference(log_probabilities(*free, permuted), log_probabilities(*free, images)),
          1e-12);
      EXPECT_GT(greatest_difference(log_probabilities(*bound, permuted),
                                    log_probabilities(*bound, images)),
                1e-6);
    }
  }
}

TEST(ImageClassifier, EveryPatchMattersAndOtherImagesDoNot) {
  for (const std::string pooling : {"class_token", "mean", "max"}) {
    SCOPED_TRACE(pooling);
    const bool token = pooling == "class_token";
    const auto model =
        make_image_model(kMean, "",
                         {"task.image_classification.pooling=" + pooling,
                          std::string("data.sequence_length=") + (token ? "17" : "16")},
                         kGray);
    EXPECT_EQ(parameter_of(*model, "embedding.class_token").defined(), token);
    const Batch images = make_images(3, kGray);
    const at::Tensor all_BK = log_probabilities(*model, images);
    const Batch alone = images.narrow(1, 2);
    EXPECT_LT(greatest_difference(log_probabilities(*model, alone)[0], all_BK[1]), 1e-12);
    for (const std::int64_t pixel : {0, 7, 15}) {
      const at::Tensor changed = log_probabilities(*model, with_value(alone, 0, pixel, 60));
      EXPECT_GT(greatest_difference(changed[0], all_BK[1]), 1e-9) << pixel;
    }
    const LossSums sums = model->loss_sums(images, std::nullopt);
    EXPECT_EQ(sums.count.item<double>(), 3);
    EXPECT_EQ(sums.tokens.item<double>(), 3 * (token ? 17 : 16));
    double nats = 0;
    for (std::int64_t b = 0; b < 3; ++b) nats -= all_BK[b][b].item<double>();
    EXPECT_NEAR(sums.nats.item<double>(), nats, 1e-12);
  }
}

// The class is the quarter that is bright.
TEST(ImageClassifier, LearnsASeparableSet) {
  constexpr std::int64_t kImages = 64;
  const auto model =
      make_task(config_of("image_classification { classes: 4 patch: 2 }", "bias: true",
                          {"data.sequence_length=17", "train.precision=fp32"}))
          ->make_model(
              {.vocabulary = 0, .class_names = {"0", "1", "2", "3"}, .image = ImageDims{8, 8, 1}},
              at::kCPU);
  Batch images = make_images(kImages, {8, 8, 1});
  images.fields["images"] = images.at("images").div(4, "floor");
  images.fields["labels"] = at::arange(kImages, at::kLong).remainder(4);
  for (std::int64_t b = 0; b < kImages; ++b) {
    images.fields["images"][b].narrow(0, b % 4 / 2 * 4, 4).narrow(1, b % 2 * 4, 4).add_(120);
  }
  const Batch learned = images.narrow(0, 48), held_out = images.narrow(48, kImages);
  for (int step = 0; step < 300; ++step) {
    model->loss_sums(learned, std::nullopt).loss.div(48).backward();
    for (const Parameter& p : model->parameters().list()) {
      p.value.detach().sub_(p.value.grad().sign(), 0.002 * (1 - step / 300.0));
      p.value.mutable_grad().zero_();
    }
  }
  EXPECT_EQ(model->loss_sums(held_out, std::nullopt).named[0].second.item<double>(), 16);
}

TEST(Pool, OfTokensWithoutPadding) {
  const at::Tensor x_BTC =
      at::tensor({1., -5., 3., -4., 9., 9., -1., -2., 9., 9., 9., 9.}).view({2, 3, 2});
  const at::Tensor lengths_B = at::tensor({2, 1}, at::kLong);
  const auto pooled = [&](Pooling pooling) { return pool(pooling, x_BTC, lengths_B, at::kDouble); };
  EXPECT_TRUE(pooled(Pooling::kMax).equal(at::tensor({3., -4., -1., -2.}).view({2, 2})));
  EXPECT_TRUE(pooled(Pooling::kMean).equal(at::tensor({2., -4.5, -1., -2.}).view({2, 2})));
  EXPECT_TRUE(pooled(Pooling::kFirst).equal(at::tensor({1., -5., -1., -2.}).view({2, 2})));
}

// ---- What is refused.

TEST(ModelsOfImages, RefuseWhatDoesNotFitInOneLine) {
  struct Case {
    std::string task, model, length, message;
    ImageDims shape = kGray;
  };
  const std::string image = "image_classification { ";
  const std::vector<Case> cases = {
      {"pixel_model {}",
       "",
       "256",
       "data.sequence_length: is 256, but an image of 28 x 28 x 1 has 784 values; set it to 784",
       {28, 28, 1}},
      {"pixel_model {}",
       "",
       "1024",
       "data.sequence_length: is 1024, but an image of 32 x 32 x 3 has 3072 values; set it to 3072",
       {32, 32, 3}},
      {image + "patch: 2 }", "", "16",
       "data.sequence_length: is 16, but an image of 4 x 4 x 1 has 4 patches and the class token; "
       "set it to 5"},
      {image + "patch: 2 pooling: mean }", "", "5",
       "data.sequence_length: is 5, but an image of 4 x 4 x 1 has 4 patches; set it to 4"},
      {image + "patch: 3 }", "", "2",
       "task.image_classification.patch: 3 does not divide 4 rows and 4 columns of the images; "
       "choose a common divisor"},
      {image + "patch: 2 pixel_mean: [0.1, 0.2] }", "", "5",
       "task.image_classification.pixel_mean: has 2 values, but images have 1 channel; give one value, or "
       "one for each"},
      {image + "patch: 2 pixel_std: [0.1, 0.2, 0.3, 0.4] }",
       "",
       "5",
       "task.image_classification.pixel_std: has 4 values, but images have 3 channels; give one value, or "
       "one for each",
       {4, 4, 3}},
      {image + "patch: 2 pixel_std: 0 }", "", "5",
       "task.image_classification.pixel_std.0: must be in (0, 1e6], is 0"},
      {image + "patch: 2 augment { shift: 4 } }", "", "5",
       "task.image_classification.augment.shift: 4 moves images of 4 x 4 pixels out of sight; set "
       "at most 3"},
      {image + "patch: 2 }", "positions: image_axes", "5",
       "model.positions: image_axes are positions of the values of an image, which only "
       "task.pixel_model reads; choose learned"},
      {"language_model {}", "positions: image_axes", "16",
       "model.positions: image_axes are positions of the values of an image, which only "
       "task.pixel_model reads; choose learned"},
      {image + "patch: 2 }", "embedding_channels: 4", "5",
       "model.embedding_channels: is for embeddings of tokens, and task.image_classification reads "
       "patches; leave it out"},
      {image + "patch: 2 }", "scale_embeddings: true", "5",
       "model.scale_embeddings: is for embeddings of tokens, and task.image_classification reads "
       "patches; leave it out"},
  };
  for (const Case& each : cases) {
    SCOPED_TRACE(each.message);
    try {
      make_image_model(each.task, each.model, {"data.sequence_length=" + each.length}, each.shape);
      ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kConfig);
      EXPECT_THAT(error.what(), testing::EndsWith(each.message));
    }
  }
}

TEST(ModelsOfImages, RefuseImagesOfAnotherSize) {
  const auto model = make_image_model(kMean, "", {}, kGray);
  try {
    log_probabilities(*model, make_images(1, {8, 2, 1}));
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "an image of 8 x 2 x 1 values is not of the model's 4 x 4 x 1");
  }
}

}  // namespace
}  // namespace birkhoff
