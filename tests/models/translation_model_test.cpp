// Models of pairs: losses and figures, shared embeddings, the independence of pairs in a batch, and
// decoding against the logits of whole targets.
//
// Legend: B batch, S tokens of a source, T tokens of a target, V vocabulary.
#include "models/translation_model.h"

#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cluster/base/error.h"
#include "model_fixture.h"
#include "tests/attention/mechanisms/mechanism_cases.h"

namespace birkhoff {
namespace {

constexpr std::int64_t kSources = 14, kTargets = 11;
const std::vector<std::int64_t> kSourceLengths = {14, 1, 6, 9}, kTargetLengths = {3, 11, 1, 8};
constexpr std::int64_t kEndMark = 0;

std::unique_ptr<TranslationModel> make_pair_model(const std::string& model_text,
                                                  const std::vector<std::string>& settings = {},
                                                  std::int64_t source_vocabulary = kVocabulary) {
  const configs::Config config = parse_config(
      "task { translation {} } data { corpus: 'none' sequence_length: 16 } train { precision: fp64 "
      "} model { layers: 2 channels: 8 heads: 2 bias: true " +
          model_text + " }",
      "test", settings);
  std::unique_ptr<Model> model = make_task(config)->make_model(
      {.vocabulary = kVocabulary, .source_vocabulary = source_vocabulary, .class_names = {}},
      at::kCPU);
  enlarge_parameters(*model);
  return std::unique_ptr<TranslationModel>(dynamic_cast<TranslationModel*>(model.release()));
}

Batch make_pairs(const std::vector<std::int64_t>& source_lengths = kSourceLengths,
                 const std::vector<std::int64_t>& target_lengths = kTargetLengths) {
  const auto rows = static_cast<std::int64_t>(source_lengths.size());
  Batch batch;
  const at::Tensor lengths_B = at::tensor(source_lengths),
                   counts_B1 = at::tensor(target_lengths).unsqueeze(1);
  const at::Tensor ids_BT = test_ids(rows, kTargets, 9);
  const at::Tensor mask_BT = at::arange(kTargets).unsqueeze(0).lt(counts_B1);
  batch.fields["inputs"] =
      test_ids(rows, kSources, 5)
          .masked_fill(at::arange(kSources).unsqueeze(0).ge(lengths_B.unsqueeze(1)), 0);
  batch.fields["lengths"] = lengths_B;
  batch.fields["targets"] = ids_BT.masked_fill(mask_BT.logical_not(), 0);
  batch.fields["mask"] = mask_BT.to(at::kByte);
  batch.fields["previous"] = at::cat({at::full({rows, 1}, kEndMark, at::kLong),
                                      batch.at("targets").narrow(1, 0, kTargets - 1)},
                                     1)
                                 .masked_fill(mask_BT.logical_not(), kEndMark);
  batch.sample_ids_B = at::arange(rows, at::kLong) + 100;
  return batch;
}

// Pair i without padding.
Batch pair_alone(const Batch& batch, std::size_t i) {
  Batch one = batch.narrow(static_cast<std::int64_t>(i), static_cast<std::int64_t>(i) + 1);
  one.fields["inputs"] = one.at("inputs").narrow(1, 0, kSourceLengths[i]);
  for (const char* name : {"previous", "targets", "mask"}) {
    one.fields[name] = one.at(name).narrow(1, 0, kTargetLengths[i]);
  }
  return one;
}

at::Tensor named_sum(const LossSums& sums, const std::string& name) {
  for (const auto& [each, value] : sums.named) {
    if (each == name) return value;
  }
  ADD_FAILURE() << "no sum " << name;
  return at::zeros({});
}

TEST(TranslationModel, LossesAndFiguresFollowFromTheLogits) {
  const auto model = make_pair_model("", {"task.translation.label_smoothing=0.25"});
  Batch batch = make_pairs();
  // The targets of the first pair are what the model finds likeliest, and one of the second.
  const at::Tensor likeliest_BT = model->logits(batch, std::nullopt).argmax(-1);
  at::Tensor targets_BT = (likeliest_BT + 1).remainder(kVocabulary);
  targets_BT[0].copy_(likeliest_BT[0]);
  targets_BT[1][4].copy_(likeliest_BT[1][4]);
  batch.fields["targets"] = targets_BT;
  const at::Tensor log_p_BTV = model->logits(batch, std::nullopt).log_softmax(-1);
  const at::Tensor mask_BT = batch.at("mask").to(at::kDouble);
  const double nats =
      -(log_p_BTV.gather(2, targets_BT.unsqueeze(2)).squeeze(2) * mask_BT).sum().item<double>();
  const double of_all = -(log_p_BTV.mean(2) * mask_BT).sum().item<double>();
  const LossSums evaluated = model->loss_sums(batch, std::nullopt);
  const LossSums trained = model->loss_sums(batch, make_noise(batch));
  for (const LossSums* sums : {&evaluated, &trained}) {
    EXPECT_NEAR(sums->nats.item<double>(), nats, 1e-11);
    EXPECT_EQ(sums->count.item<double>(), 3 + 11 + 1 + 8);
    EXPECT_EQ(sums->tokens.item<double>(), 14 + 1 + 6 + 9 + 3 + 11 + 1 + 8);
    EXPECT_EQ(named_sum(*sums, "accuracy").item<double>(), 3 + 1);
    EXPECT_EQ(named_sum(*sums, "accuracy_per_sequence").item<double>(), 1);
    EXPECT_EQ(named_sum(*sums, "sequences").item<double>(), 4);
  }
  EXPECT_NEAR(evaluated.loss.item<double>(), nats, 1e-11);
  EXPECT_NEAR(trained.loss.item<double>(), 0.75 * nats + 0.25 * of_all, 1e-11);
  ASSERT_EQ(model->figures().size(), 2U);
  EXPECT_EQ(model->figures()[1].per, "sequences");
  EXPECT_EQ(model->decoder(), nullptr);
  EXPECT_EQ(model->source_decoder(), model.get());
}

// A row may have no targets at all, in a batch that is filled up.
TEST(TranslationModel, PairsWithoutTargetsDoNotCount) {
  const auto model = make_pair_model("");
  Batch batch = make_pairs();
  const LossSums all = model->loss_sums(batch.narrow(0, 2), std::nullopt);
  batch.fields["mask"].narrow(0, 2, 2).zero_();
  const LossSums sums = model->loss_sums(batch, std::nullopt);
  EXPECT_NEAR(sums.nats.item<double>(), all.nats.item<double>(), 1e-12);
  EXPECT_EQ(named_sum(sums, "sequences").item<double>(), 2);
  EXPECT_EQ(named_sum(sums, "accuracy_per_sequence").item<double>(),
            named_sum(all, "accuracy_per_sequence").item<double>());
}

TEST(TranslationModel, TargetsHaveALengthOfTheirOwn) {
  const std::string mechanisms =
      "positions: learned attention { group { mechanism { sinkhorn { block: 4 } } } } encoder { "
      "attention { group { mechanism { sinkhorn { block: 8 } } } } cross_attention { group { "
      "mechanism { sortcut { blocks: 2 sinkhorn { block: 8 } } } } } }";
  const auto model = make_pair_model(mechanisms, {"task.translation.target_length=12"});
  EXPECT_EQ(model->max_tokens(), 12);
  EXPECT_EQ(model->max_source_tokens(), 16);
  EXPECT_EQ(parameter_of(*model, "positions.weight").size(0), 12);
  EXPECT_EQ(parameter_of(*model, "encoder.positions.weight").size(0), 16);
  EXPECT_GT(model->loss_sums(make_pairs(), std::nullopt).nats.item<double>(), 0);
  const auto refused = [&](const std::string& setting) {
    try {
      const auto made = make_pair_model(mechanisms, {setting});
      made->loss_sums(make_pairs(), std::nullopt);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_THAT(refused("task.translation.target_length=10"),
              ::testing::HasSubstr("task.translation.target_length 10 is not a multiple of the "
                                   "block length 4"));
  EXPECT_THAT(refused("task.translation.target_length=8"),
              ::testing::HasSubstr("a sequence of 11 tokens is longer than "
                                   "task.translation.target_length = 8"));
  EXPECT_THAT(refused("data.sequence_length=8"),
              ::testing::HasSubstr("a sequence of 14 tokens is longer than data.sequence_length"));
}

TEST(TranslationModel, OneTableServesBothSidesAndTheOutput) {
  const auto shared = make_pair_model("encoder { share_embedding: true }");
  std::vector<std::string> tables;
  for (const Parameter& parameter : shared->parameters().list()) {
    if (parameter.name.ends_with("embedding.weight") || parameter.name.starts_with("output")) {
      tables.push_back(parameter.name);
    }
  }
  EXPECT_THAT(tables, ::testing::ElementsAre("encoder.embedding.weight"));
  // Models with two and three tables of the same values have gradients that add up to its own.
  const Batch batch = make_pairs();
  const auto gradient = [&](TranslationModel& model) {
    for (const Parameter& parameter : model.parameters().list()) {
      at::Tensor same = parameter_of(*shared, parameter.name);
      if (!same.defined()) same = parameter_of(*shared, "encoder.embedding.weight");
      parameter.value.detach().copy_(same.detach());
    }
    model.loss_sums(batch, make_noise(batch)).loss.backward();
    at::Tensor sum = parameter_of(model, "encoder.embedding.weight").grad().clone();
    for (const char* name : {"embedding.weight", "output.weight"}) {
      const at::Tensor table = parameter_of(model, name);
      if (table.defined()) {
        EXPECT_GT(table.grad().abs().max().item<double>(), 1e-6) << name;
        sum += table.grad();
      }
    }
    return sum;
  };
  const at::Tensor expected = gradient(*shared);
  EXPECT_LE(greatest_difference(gradient(*make_pair_model("")), expected), 1e-11);
  EXPECT_LE(greatest_difference(gradient(*make_pair_model("tie_embeddings: false")), expected),
            1e-11);
}

TEST(TranslationModel, VocabulariesMayDifferUnlessTheTableIsShared) {
  const auto model = make_pair_model("", {}, /*source_vocabulary=*/29);
  EXPECT_EQ(parameter_of(*model, "encoder.embedding.weight").size(0), 29);
  EXPECT_EQ(parameter_of(*model, "embedding.weight").size(0), kVocabulary);
  Batch batch = make_pairs();
  batch.fields["inputs"] = batch.at("inputs") + 18;
  EXPECT_EQ(model->logits(batch, std::nullopt).sizes(),
            (std::vector<std::int64_t>{4, kTargets, kVocabulary}));
  try {
    make_pair_model("encoder { share_embedding: true }", {}, 29);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kConfig);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("sources have 29 ids and targets 11"));
  }
}

TEST(TranslationModel, FlopsAreThoseOfBothStacks) {
  const auto model =
      make_pair_model("", {"task.translation.target_length=8", "model.encoder.layers=3"});
  const double C = 8, S = 16, T = 8;
  const double encoder = 3 * (2 * S * 12 * C * C + 4 * C * S * S);
  const double decoder = 2 * (2 * T * (4 + 2 + 8) * C * C + 2 * S * 2 * C * C +
                              4 * C * (T * (T + 1) / 2) + 4 * C * T * S);
  EXPECT_DOUBLE_EQ(model->forward_flops_per_sequence(),
                   encoder + decoder + 2 * T * C * kVocabulary);
}

// Every variant of every mechanism on each side where it may be.
struct SideCase {
  std::string name, model_text;
  test::MechanismCase mechanism;
};

std::vector<SideCase> all_sides() {
  std::vector<SideCase> sides;
  for (const test::MechanismCase& each : test::all_cases()) {
    const MechanismTraits traits = test::Built(each.config, each.causal, at::kDouble).traits;
    const std::string attention =
        "attention { group { mechanism { " + each.config.ShortDebugString() + " } } }";
    if (each.causal) {
      sides.push_back({"decoder_" + each.name, attention, each});
      continue;
    }
    sides.push_back({"encoder_" + each.name, "encoder { " + attention + " }", each});
    if (!traits.supports_cross_attention) continue;
    sides.push_back({"cross_" + each.name, "encoder { cross_" + attention + " }", each});
  }
  return sides;
}

class EachSide : public ::testing::TestWithParam<SideCase> {};
INSTANTIATE_TEST_SUITE_P(TranslationModel, EachSide, ::testing::ValuesIn(all_sides()),
                         [](const auto& variant) { return variant.param.name; });

// The other pairs of a batch, and padding, change nothing. Sums over keys have another order if
// their number differs.
TEST_P(EachSide, APairDoesNotDependOnItsBatch) {
  const auto model = make_pair_model(GetParam().model_text);
  const at::NoGradGuard no_grad;
  const Batch batch = make_pairs();
  const at::Tensor logits_BTV = model->logits(batch, std::nullopt);
  double nats = 0;
  for (std::size_t i = 0; i < kSourceLengths.size(); ++i) {
    const Batch alone = pair_alone(batch, i);
    EXPECT_LE(greatest_difference(
                  model->logits(alone, std::nullopt)[0],
                  logits_BTV[static_cast<std::int64_t>(i)].narrow(0, 0, kTargetLengths[i])),
              1e-11)
        << i;
    nats += model->loss_sums(alone, std::nullopt).nats.item<double>();
  }
  EXPECT_NEAR(model->loss_sums(batch, std::nullopt).nats.item<double>(), nats, 1e-11 * nats);
}

TEST_P(EachSide, DecodingEqualsTheLogitsOfWholeTargetsAndRowsMove) {
  const test::MechanismCase& mechanism = GetParam().mechanism;
  if (mechanism.causal &&
      !test::Built(mechanism.config, true, at::kDouble).traits.exact_in_decoding) {
    GTEST_SKIP() << "inexact by definition";
  }
  const auto model = make_pair_model(GetParam().model_text);
  const Batch batch = make_pairs();
  const at::Tensor logits_BTV = model->logits(batch, std::nullopt).detach();
  Batch sources;
  sources.fields["inputs"] = batch.at("inputs");
  sources.fields["lengths"] = batch.at("lengths");
  const auto cache = model->decode_cache(sources);
  at::Tensor rows = at::arange(4, at::kLong);
  for (std::int64_t t = 0; t < kTargets; ++t) {
    if (t == 2) {  // as a beam search does
      const at::Tensor chosen = at::tensor({3, 1, 0, 1, 3}, at::kLong);
      cache->select_rows(chosen);
      rows = rows.index_select(0, chosen);
    }
    EXPECT_EQ(cache->length(), t);
    const at::Tensor step_BV =
        model->decode_step(*cache, batch.at("previous").select(1, t).index_select(0, rows));
    for (std::int64_t b = 0; b < rows.size(0); ++b) {
      const auto row = rows[b].item<std::int64_t>();
      if (t >= kTargetLengths[static_cast<std::size_t>(row)]) continue;
      EXPECT_LE(greatest_difference(step_BV[b], logits_BTV[row][t]), 1e-10) << t << ", " << row;
    }
  }
}

TEST(TranslationModel, RecomputationAndMicroBatchesGiveTheSameGradients) {
  const std::string model_text =
      "dropout { embedding: 0.2 residual: 0.3 activation: 0.1 } encoder { share_embedding: true "
      "attention { group { mechanism { sinkhorn { block: 4 gumbel_noise: true dropout: 0.2 } } } } "
      "cross_attention { group { mechanism { dense { dropout: 0.2 } } } } }";
  const Batch batch = make_pairs();
  const auto gradients = [&](const std::string& setting, std::int64_t rows) {
    const auto model = make_pair_model(model_text, {setting});
    for (std::int64_t begin = 0; begin < batch.size(); begin += rows) {
      const Batch part = batch.narrow(begin, begin + rows);
      model->loss_sums(part, make_noise(part)).loss.backward();
    }
    std::vector<at::Tensor> all;
    for (const Parameter& parameter : model->parameters().list()) {
      all.push_back(parameter.value.grad());
    }
    return all;
  };
  const auto expected = gradients("train.recompute=false", 4),
             recomputed = gradients("train.recompute=true", 4),
             micro = gradients("train.recompute=false", 1);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    ASSERT_TRUE(expected[i].defined());
    EXPECT_TRUE(at::equal(expected[i], recomputed[i])) << i;
    EXPECT_LE(greatest_difference(expected[i], micro[i]),
              1e-11 * std::max(1.0, expected[i].abs().max().item<double>()))
        << i;
  }
}

// The routing mechanism's commitment is the mean over a source's tokens for each of its targets.
TEST(TranslationModel, AuxiliaryLossesOfTheEncoderWeighTargets) {
  const auto model = make_pair_model(
      "positions: no_positions encoder { layers: 1 attention { group { mechanism { routing { "
      "clusters: 1 window: 16 commitment: 0.5 } } } } }");
  const auto auxiliary = [&](std::int64_t sources, std::int64_t targets) {
    Batch batch = make_pairs({sources}, {targets});
    batch.fields["inputs"].fill_(4);
    const LossSums sums = model->loss_sums(batch, make_noise(batch));
    return named_sum(sums, "encoder.blocks.0.attention.groups.0.auxiliary_loss").item<double>();
  };
  const double one = auxiliary(1, 1);
  EXPECT_GT(one, 0);
  EXPECT_NEAR(auxiliary(9, 1), one, 1e-12);
  EXPECT_NEAR(auxiliary(9, 7), 7 * one, 1e-12);
}

// Computed once by this program. A change of it changes all results.
TEST(TranslationModel, TheLossOfAFixedModelIsTheSame) {
  const auto model = make_pair_model(
      "positions: sinusoidal scale_embeddings: true norm: post activation: relu encoder { attention "
      "{ group { mechanism { sinkhorn { block: 4 } } } } }");
  EXPECT_NEAR(model->loss_sums(make_pairs(), std::nullopt).nats.item<double>(), 58.377105175938993,
              1e-10);
}

}  // namespace
}  // namespace birkhoff
