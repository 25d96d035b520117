// Class weights: the gradient of a step is that of PyTorch's CrossEntropyLoss(weight) on the global
// batch, on any number of ranks and micro-batches.
//
// Legend: B batch, K classes.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <vector>

#include "models/losses/classification_sums.h"
#include "runtime/optimizers/optimizer.h"
#include "runtime/training_step.h"
#include "tests/cluster/base/thread_group.h"
#include "tests/models/model_fixture.h"

namespace birkhoff {
namespace {

constexpr std::int64_t kTexts = 8;

// Four texts have class 1, which weighs little: the sum of weights is not that of any equal part.
Batch weighted_texts() {
  Batch batch;
  batch.fields["inputs"] = test_ids(kTexts, 16, 21);
  batch.fields["lengths"] = at::tensor({16, 1, 7, 12, 3, 16, 5, 9}, at::kLong);
  batch.fields["labels"] = at::tensor({1, 0, 1, 2, 1, 1, 2, 0}, at::kLong);
  batch.sample_ids_B = at::arange(kTexts, at::kLong);
  batch.global_size = kTexts;
  return batch;
}

configs::Config weighted_config(const std::string& weights, int micro_batch, int shards) {
  configs::Config config = parse_config(
      "task { classification { classes: 3 " + weights +
          " } } data { corpus: 'none' sequence_length: 16 } train { precision: fp64 "
          "global_batch: 8 clip_norm: 0 } model { layers: 1 channels: 8 heads: 2 attention { group "
          "{ mechanism { routing { clusters: 2 window: 8 commitment: 0.5 } } } } }",
      "test", {});
  config.mutable_train()->set_micro_batch(micro_batch);
  config.mutable_train()->mutable_invariant()->set_shards(shards);
  return config;
}

const std::vector<double> kWeights = {3, 0.03125, 0.5};
constexpr char kWeightText[] = "class_weight: 3 class_weight: 0.03125 class_weight: 0.5";

// The mean gradient of all parameters, one after another, by autograd.
at::Tensor expected_gradient(Model& model) {
  const Batch batch = weighted_texts();
  at::Tensor loss = at::zeros({}, at::kDouble);
  double weight = 0;
  for (std::int64_t i = 0; i < kTexts; ++i) {
    const Batch text = batch.narrow(i, i + 1);
    const double of_class =
        kWeights[static_cast<std::size_t>(text.at("labels").item<std::int64_t>())];
    const NoiseKey noise{.seed = 0,
                         .step = at::full({1}, 1, at::kLong),
                         .layer = 0,
                         .sample_ids_B = text.sample_ids_B};
    loss = loss + of_class * model.loss_sums(text, noise).loss;
    weight += of_class;
  }
  std::vector<at::Tensor> parameters;
  for (const Parameter& parameter : model.parameters().list())
    parameters.push_back(parameter.value);
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& gradient :
       torch::autograd::grad({loss / weight}, parameters, {}, std::nullopt, false, true)) {
    if (gradient.defined()) gradients.push_back(gradient.flatten());
  }
  return at::cat(gradients);
}

TEST(ClassWeights, AStepIsPyTorchsWeightedMeanOfTheGlobalBatch) {
  // Of a model without weights.
  const std::unique_ptr<Model> plain = make_model(weighted_config("", 0, 0), kVocabulary, at::kCPU);
  enlarge_parameters(*plain);
  const at::Tensor expected = expected_gradient(*plain);
  const double norm = expected.norm().item<double>();
  EXPECT_GT(norm, 1e-3);
  for (const int shards : {0, 8}) {
    for (const auto& [ranks, micro_batch] : {std::pair(1, 0), {1, 3}, {2, 1}, {2, 0}, {4, 1}}) {
      run_ranks(ranks, [&, micro = micro_batch](ProcessGroup& group) {
        const configs::Config config = weighted_config(kWeightText, micro, shards);
        const std::unique_ptr<Model> model = make_model(config, kVocabulary, at::kCPU);
        enlarge_parameters(*model);
        GradBuckets buckets(model->parameters(), group, 100, shards, 0);
        const auto optimizer = make_optimizer(config.train().optimizer(), buckets);
        TrainingStep step(config.train(), *model, group, group, buckets, *optimizer);
        const Interval mine = rank_share(kTexts, shards, group.rank(), group.size());
        Batch batch = weighted_texts().narrow(mine.begin, mine.end);
        batch.global_size = kTexts;
        const GradientSums sums = step.sum_gradients(batch, 1, 1);
        EXPECT_EQ(sums.count, kTexts);
        EXPECT_EQ(sums.weight, 2 * 3 + 4 * 0.03125 + 2 * 0.5);
        EXPECT_NEAR(sums.norm, norm, 1e-12 * norm) << ranks << " ranks";
        std::vector<at::Tensor> gradients;
        for (const Parameter& parameter : model->parameters().list())
          gradients.push_back(parameter.value.grad().flatten());
        EXPECT_LT(greatest_difference(at::cat(gradients) / sums.weight, expected), 1e-12 * norm);
      });
    }
  }
}

// The loss and its gradient, against PyTorch's own function.
TEST(ClassWeights, TheLossIsPyTorchs) {
  const at::Tensor logits_BK = (at::arange(24, at::kDouble).mul(1.7).sin() * 4).view({kTexts, 3});
  const at::Tensor weight_K = at::tensor(kWeights, at::kDouble);
  const at::Tensor labels_B = weighted_texts().at("labels");
  const at::Tensor mine = logits_BK.clone().set_requires_grad(true),
                   theirs = logits_BK.clone().set_requires_grad(true);
  const LossSums sums = classification_sums(mine, labels_B, weight_K.index_select(0, labels_B));
  const at::Tensor expected = at::cross_entropy_loss(theirs, labels_B, weight_K);
  EXPECT_NEAR((sums.loss / sums.weight).item<double>(), expected.item<double>(), 1e-14);
  (sums.loss / sums.weight).backward();
  expected.backward();
  EXPECT_LT(greatest_difference(mine.grad(), theirs.grad()), 1e-15);
  EXPECT_NEAR((sums.nats / sums.count).item<double>(),
              at::cross_entropy_loss(logits_BK, labels_B).item<double>(), 1e-14)
      << "the reported loss has no weights";
}

// The loss is the weighted sum of those of single samples of a model without weights.
TEST(ClassWeights, ImagesAndPointSetsHaveThem) {
  const auto config_of = [](const std::string& task, const std::string& weights) {
    return parse_config("task { " + task + " { classes: 3 " + weights +
                            " } } data { corpus: 'none' sequence_length: 17 } train { precision: "
                            "fp64 global_batch: 6 } model { layers: 1 channels: 8 heads: 2 }",
                        "test", {});
  };
  for (const std::string task : {"image_classification", "point_sets"}) {
    const configs::Config config = config_of(task, kWeightText), plain = config_of(task, "");
    const std::unique_ptr<Model> weighted = make_model(config, 0, at::kCPU),
                                 without = make_model(plain, 0, at::kCPU);
    const Batch batch = make_task(config)->synthetic_batch(0, at::kCPU);
    const LossSums sums = weighted->loss_sums(batch, make_noise(batch));
    double loss = 0, weight = 0;
    for (std::int64_t i = 0; i < batch.size(); ++i) {
      const Batch sample = batch.narrow(i, i + 1);
      const double of_class =
          kWeights[static_cast<std::size_t>(sample.at("labels").item<std::int64_t>())];
      loss += of_class * without->loss_sums(sample, make_noise(sample)).loss.item<double>();
      weight += of_class;
    }
    EXPECT_NEAR(sums.loss.item<double>(), loss, 1e-12 * loss) << task;
    EXPECT_EQ(sums.weight.item<double>(), weight) << task;
    EXPECT_EQ(sums.count.item<double>(), 6) << task;
  }
}

TEST(ClassWeights, EvaluationsHaveNone) {
  const Batch batch = weighted_texts();
  const auto loss_of = [&](const std::string& weights) {
    const std::unique_ptr<Model> model =
        make_model(weighted_config(weights, 0, 0), kVocabulary, at::kCPU);
    enlarge_parameters(*model);
    return model->loss_sums(batch, std::nullopt);
  };
  EXPECT_EQ(loss_of(kWeightText).loss.item<double>(), loss_of("").loss.item<double>());
  EXPECT_FALSE(loss_of(kWeightText).weight.defined());
}

}  // namespace
}  // namespace birkhoff
