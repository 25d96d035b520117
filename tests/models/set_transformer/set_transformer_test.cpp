// Set transformers against explicit loops in fp64: blocks, layers, pooling, the whole network; the
// order of points, the weights of points, gradients, and what is refused.
//
// Legend: B batch, N points, M points of another set.
#include "models/set_transformer/set_transformer.h"

#include <c10/core/GradMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>

#include "cluster/base/error.h"
#include "tests/models/set_transformer/set_loops.h"

namespace birkhoff {
namespace {

struct Variant {
  int half_steps = 1;  // 0: dense
  int inducing = 3, seeds = 1;
  bool norms = true, as_layers = false;

  std::vector<std::string> settings() const {
    return {set_attention(half_steps), kSet + "inducing_points=" + std::to_string(inducing),
            kSet + "seeds=" + std::to_string(seeds),
            kSet + "layer_norm=" + (norms ? "true" : "false"),
            kSet + "pooling_attention=" + (as_layers ? "as_layers" : "softmax")};
  }
};

const Variant kVariants[] = {
    {.half_steps = 0},
    {.half_steps = 1, .seeds = 2},
    {.half_steps = 3, .norms = false},
    {.half_steps = 5, .seeds = 4, .as_layers = true},
    {.half_steps = 3, .inducing = 0},
    {.half_steps = 0, .inducing = 0, .seeds = 3, .norms = false},
    {.half_steps = 21, .inducing = 9, .as_layers = true},
};

std::string text_of(const Variant& variant) {
  std::string text;
  for (const std::string& setting : variant.settings()) text += setting + " ";
  return text;
}

TEST(SetTransformer, IsItsDefinitionInLoops) {
  const Batch sets = make_sets(4);
  for (const Variant& variant : kVariants) {
    SCOPED_TRACE(text_of(variant));
    const auto model = make_set_model(variant.settings());
    const int half_steps = std::max(1, variant.half_steps);
    const Loops loops(model->parameters(), half_steps, variant.norms);
    const at::Tensor log_p_BK = log_probabilities_of(*model, sets);
    double nats = 0;
    for (std::int64_t b = 0; b < 4; ++b) {
      const Matrix logits = loops.network(sets.at("points")[b], variant.as_layers ? half_steps : 1);
      double sum = 0;
      for (const double logit : logits.values) sum += std::exp(logit);
      Matrix log_p = logits;
      for (double& value : log_p.values) value -= std::log(sum);
      EXPECT_LT(difference(log_p, log_p_BK[b].unsqueeze(0)), 1e-12) << b;
      nats -= log_p.at(0, static_cast<std::size_t>(b % 3));
    }
    const LossSums sums = model->loss_sums(sets, std::nullopt);
    EXPECT_NEAR(sums.nats.item<double>(), nats, 1e-11);
    EXPECT_EQ(sums.count.item<double>(), 4);
    EXPECT_EQ(sums.tokens.item<double>(), 4 * kPoints);
    EXPECT_EQ(sums.named[0].second.item<double>(),
              log_p_BK.argmax(-1).eq(sets.at("labels")).sum().item<double>());
  }
}

// A block alone: x and y of any widths and numbers of points.
TEST(SetBlock, IsItsDefinitionInLoops) {
  for (const int half_steps : {0, 1, 3, 7}) {
    for (const auto& [n, m] : {std::pair(5, 3), {3, 5}, {1, 6}, {6, 1}, {4, 4}}) {
      const configs::Config config = set_config({set_attention(half_steps)});
      Parameters parameters = make_parameters(config, at::kCPU);
      const SetBlock block(config, config.model().attention(0), "model.attention.0",
                           KeySource::kMemory, {4, 3}, 0, 6, "block", parameters);
      set_values(parameters);
      const at::Tensor x = values_of({2, n, 4}, 1), y = values_of({2, m, 3}, 2);
      const at::Tensor out = block(x, y, std::nullopt);
      const Loops loops(parameters, 1, true);
      for (std::int64_t b = 0; b < 2; ++b) {
        const Matrix expected =
            loops.block("block", Matrix(x[b]), Matrix(y[b]), false, std::max(1, half_steps));
        EXPECT_LT(difference(expected, out[b]), 1e-12) << half_steps << " " << n << " " << m;
      }
      const double pairs = n * m, C = kChannels;
      EXPECT_EQ(block.forward_flops(n, m),
                2 * (n * (4 + C) * C + m * 3 * 2 * C) +
                    (half_steps == 0 ? 4 : 2 * (half_steps + 1)) * pairs * C);
    }
  }
}

TEST(SetTransformer, OneHalfStepIsSoftmax) {
  const Batch sets = make_sets(3);
  EXPECT_LT(greatest_difference(log_probabilities_of(*make_set_model({set_attention(1)}), sets),
                                log_probabilities_of(*make_set_model({set_attention(0)}), sets)),
            1e-12);
  EXPECT_GT(greatest_difference(log_probabilities_of(*make_set_model({set_attention(3)}), sets),
                                log_probabilities_of(*make_set_model({set_attention(0)}), sets)),
            1e-4);
}

TEST(SetTransformer, TheOrderOfPointsDoesNotMatterAndEachPointDoes) {
  const Batch sets = make_sets(3);
  Batch permuted = sets;
  permuted.fields["points"] =
      sets.at("points").index_select(1, (at::arange(kPoints) * 3 + 2).remainder(kPoints));
  for (const Variant& variant : kVariants) {
    SCOPED_TRACE(text_of(variant));
    const auto model = make_set_model(variant.settings());
    const at::Tensor all_BK = log_probabilities_of(*model, sets);
    EXPECT_LT(greatest_difference(log_probabilities_of(*model, permuted), all_BK), 1e-12);
    for (std::int64_t n = 0; n < kPoints; ++n) {
      Batch changed = sets;
      changed.fields["points"] = sets.at("points").clone();
      changed.fields["points"][1][n][1] += 0.5;
      const at::Tensor others_BK = log_probabilities_of(*model, changed);
      EXPECT_GT(greatest_difference(others_BK[1], all_BK[1]), 1e-7) << n;
      EXPECT_LT(greatest_difference(others_BK[0], all_BK[0]), 1e-13) << "another set";
    }
  }
}

// Rows of weights sum to 1 and columns to N / M, as outputs for values that are one-hot show.
TEST(SetAttention, WeightsHaveTheMarginalsOfBothSets) {
  const configs::Config config = set_config({set_attention(199)});
  Parameters parameters(3, at::kDouble);
  constexpr std::int64_t N = 4, M = 6;
  const auto mechanism = make_mechanism(
      config.model().attention(0).group(0).mechanism(),
      {.channels = M, .heads = 1, .head_dim = M, .sequence_length = M}, "test", parameters);
  EXPECT_TRUE(mechanism->traits().supports_sets);
  AttentionInput in;
  in.q_BHLD = values_of({2, 1, N, M}, 1) * 2;
  in.k_BHSD = values_of({2, 1, M, M}, 2);
  in.v_BHSD = at::eye(M, at::kDouble).expand({2, 1, M, M}).contiguous();
  const at::Tensor weights_BNM = mechanism->attend(in, Path::kFused).out_BHLD.squeeze(1);
  EXPECT_GT(weights_BNM.min().item<double>(), 0);
  EXPECT_LT((weights_BNM.sum(2) - 1).abs().max().item<double>(), 1e-13);
  EXPECT_LT((weights_BNM.sum(1) - static_cast<double>(N) / M).abs().max().item<double>(), 1e-12);
  EXPECT_GT((weights_BNM - 1.0 / M).abs().max().item<double>(), 1e-2) << "weights are not equal";
}

// A single row of a balanced matrix with equal column sums is uniform, whatever the scores are.
TEST(SetPooling, WithOneSeedIsAMeanIfColumnsAreBalanced) {
  const Batch sets = make_sets(3);
  const auto model = [&](int half_steps, int seeds) {
    return make_set_model(
        Variant{.half_steps = half_steps, .seeds = seeds, .as_layers = true}.settings());
  };
  const auto of_pooling = [](Model& each, const std::string& part) {
    return parameter_of(each, "pooling.attention." + part);
  };
  for (const int half_steps : {3, 5}) {
    const auto one = model(half_steps, 1), two = model(half_steps, 2);
    ASSERT_EQ(one->warnings().size(), 1U);
    EXPECT_THAT(one->warnings()[0], testing::HasSubstr("gives all points the same weight"));
    EXPECT_TRUE(two->warnings().empty());
    for (const auto& [each, pools] : {std::pair(one.get(), true), {two.get(), false}}) {
      const at::Tensor before = log_probabilities_of(*each, sets);
      each->loss_sums(sets, std::nullopt).loss.backward();
      const at::Tensor d_keys =
          of_pooling(*each, "key_value.weight").grad().narrow(0, 0, kChannels);
      EXPECT_EQ(d_keys.abs().max().item<double>() < 1e-13, pools);
      // Other keys have the same outputs.
      of_pooling(*each, "key_value.weight").detach().narrow(0, 0, kChannels).mul_(-3);
      EXPECT_EQ(greatest_difference(log_probabilities_of(*each, sets), before) < 1e-13, pools);
    }
    // The definition with equal weights.
    const Loops loops(one->parameters(), half_steps, true);
    Matrix x(sets.at("points")[1]);
    for (const char* name : {"blocks.0", "blocks.1"}) x = loops.layer(name, x);
    Matrix mean(1, kChannels);
    for (std::size_t n = 0; n < x.rows; ++n) {
      for (std::size_t c = 0; c < kChannels; ++c) {
        mean.at(0, c) += x.at(n, c) / static_cast<double>(x.rows);
      }
    }
    const Matrix logits = loops.linear(
        "output", loops.block("pooling", loops.points("pooling.seeds"), mean, false, 1));
    double sum = 0;
    for (const double logit : logits.values) sum += std::exp(logit);
    Matrix log_p = logits;
    for (double& value : log_p.values) value -= std::log(sum);
    EXPECT_LT(difference(log_p, log_probabilities_of(*one, sets)[1].unsqueeze(0)), 1e-12);
  }
  EXPECT_TRUE(model(1, 1)->warnings().empty());
  EXPECT_TRUE(make_set_model({set_attention(3)})->warnings().empty());
}

// Along random directions, by differences of the loss.
TEST(SetTransformer, GradientsAreThoseOfTheLoss) {
  const Batch sets = make_sets(4);
  for (const Variant& variant : kVariants) {
    SCOPED_TRACE(text_of(variant));
    const auto model = make_set_model(variant.settings());
    const auto loss = [&] { return model->loss_sums(sets, std::nullopt).loss; };
    loss().backward();
    std::int64_t seed = 40;
    for (const Parameter& p : model->parameters().list()) {
      const at::Tensor direction = values_of(p.value.sizes(), seed++);
      const double slope = (p.value.grad() * direction).sum().item<double>();
      constexpr double kStep = 1e-5;
      const auto moved = [&](double step) {
        const c10::AutoGradMode no_gradients(false);
        p.value.add_(direction, step);
        const double value = loss().item<double>();
        p.value.sub_(direction, step);
        return value;
      };
      EXPECT_NEAR((moved(kStep) - moved(-kStep)) / (2 * kStep), slope,
                  1e-6 * std::max(1.0, std::abs(slope)))
          << p.name;
    }
  }
}

TEST(SetTransformer, RecomputesTheSameBits) {
  const Batch sets = make_sets(4);
  const auto gradients = [&](const std::string& recompute) {
    std::vector<std::string> settings = Variant{.half_steps = 3}.settings();
    settings.insert(settings.end(), {kSet + "dropout=0.4", "train.recompute=" + recompute});
    const auto model = make_set_model(settings);
    const LossSums sums = model->loss_sums(sets, make_noise(sets));
    sums.loss.backward();
    std::vector<at::Tensor> all{sums.nats};
    for (const Parameter& p : model->parameters().list()) all.push_back(p.value.grad());
    return all;
  };
  const auto kept = gradients("false"), recomputed = gradients("true");
  ASSERT_EQ(kept.size(), recomputed.size());
  for (std::size_t i = 0; i < kept.size(); ++i) EXPECT_TRUE(at::equal(kept[i], recomputed[i])) << i;
}

TEST(SetTransformer, DropoutChangesTrainingOnly) {
  const Batch sets = make_sets(4);
  const auto nats = [&](const std::string& dropout, bool trains, std::int64_t step = 3) {
    const auto model = make_set_model({kSet + "dropout=" + dropout});
    return model->loss_sums(sets, trains ? std::optional(make_noise(sets, step)) : std::nullopt)
        .nats.item<double>();
  };
  EXPECT_EQ(nats("0.5", false), nats("0", false));
  EXPECT_EQ(nats("0", true), nats("0", false));
  EXPECT_NE(nats("0.5", true), nats("0", true));
  EXPECT_EQ(nats("0.5", true), nats("0.5", true));
  EXPECT_NE(nats("0.5", true, 4), nats("0.5", true));
}

TEST(SetTransformer, InBf16IsCloseToFp64) {
  const Batch sets = make_sets(4);
  for (const int half_steps : {0, 3}) {
    const auto nats = [&](const std::string& precision) {
      const auto model =
          make_set_model({set_attention(half_steps), "train.precision=" + precision});
      return model->loss_sums(sets, std::nullopt).nats.item<double>();
    };
    EXPECT_NEAR(nats("fp32"), nats("fp64"), 1e-4);
    EXPECT_NEAR(nats("bf16"), nats("fp64"), 0.05 * nats("fp64"));
  }
}

// Groups of heads with mechanisms of their own, and heads that share keys.
TEST(SetTransformer, HeadGroupsAttendOnTheirOwn) {
  const Batch sets = make_sets(3);
  const auto of_groups = [&](const std::string& groups) {
    return log_probabilities_of(*make_set_model({"model.attention.0={ " + groups + " }"}), sets);
  };
  const std::string dense = "group { heads: 1 mechanism { dense {} } } ",
                    balanced = "group { heads: 1 mechanism { sinkformer { half_steps: 3 } } } ";
  EXPECT_EQ(of_groups(dense + balanced).sizes(), (std::vector<std::int64_t>{3, 3}));
  EXPECT_GT(greatest_difference(of_groups(dense + balanced), of_groups(dense + dense)), 1e-6);
  EXPECT_LT(
      greatest_difference(of_groups(dense + dense), of_groups("group { mechanism { dense {} } }")),
      1e-12);
  // Heads that share keys and values: a model of its own, with fewer parameters.
  const std::string shared = "group { key_heads: 1 mechanism { sinkformer { half_steps: 3 } } }",
                    apart = "group { mechanism { sinkformer { half_steps: 3 } } }";
  const at::Tensor shared_BK = of_groups(shared);
  EXPECT_LT(greatest_difference(shared_BK.exp().sum(-1), at::ones({3}, at::kDouble)), 1e-12);
  EXPECT_GT(greatest_difference(shared_BK, of_groups(apart)), 1e-6);
  const auto elements = [](const std::string& groups) {
    return make_set_model({"model.attention.0={ " + groups + " }"})->parameters().num_elements();
  };
  EXPECT_LT(elements(shared), elements(apart));
}

TEST(PointSets, RefuseWhatDoesNotFitInOneLine) {
  struct Refused {
    std::vector<std::string> settings;
    std::string message;
  };
  const Refused cases[] = {
      {{"mesh.tensor=2"},
       "mesh.tensor: must be 1 with task.point_sets, whose model is not divided; use more "
       "data-parallel ranks or train.zero_stage"},
      {{"model.feed_forward=64"},
       "model.feed_forward: has no effect with task.point_sets, whose layers are as wide as "
       "model.channels; leave it out"},
      {{"task.point_sets.dimensions=1", "task.point_sets.augment.rotation=0.1"},
       "task.point_sets.augment.rotation: points with 1 coordinate cannot be rotated; leave it out"},
      {{"model.attention.0={ group { mechanism { block_local { block: 7 } } } }"},
       "model.attention.0.group.0.mechanism: it is for sequences, and the points of a set have no "
       "order; choose dense or sinkformer"},
      {{"model.attention.0={ group { mechanism { sortcut { sinkhorn { block: 7 } } } } }"},
       "the points of a set have no order; choose dense or sinkformer"},
      {{kSet + "dropout=1"}, kSet + "dropout: must be in [0, 1), is 1"},
      {{kSet + "seeds=0"}, kSet + "seeds: must be in [1, 65536], is 0"},
      {{"task.point_sets.augment.rotation=1.5"},
       "task.point_sets.augment.rotation: must be in [0, 1], is 1.5"},
      {{"task.point_sets.augment.min_scale=0"},
       "task.point_sets.augment.min_scale: must be in (0, 1], is 0"},
      {{"task.point_sets.augment.max_scale=0.5"},
       "task.point_sets.augment.max_scale: must be in [1, 1e6], is 0.5"},
  };
  for (const Refused& each : cases) {
    SCOPED_TRACE(each.message);
    try {
      make_set_model(each.settings);
      ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kConfig);
      EXPECT_THAT(error.what(), testing::HasSubstr(each.message));
    }
  }
}

TEST(PointSets, RefusePointsOfAnotherDimension) {
  const auto model = make_set_model();
  Batch sets = make_sets(1);
  sets.fields["points"] = sets.at("points").narrow(2, 0, 2);
  try {
    log_probabilities_of(*model, sets);
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "points have 2 coordinates, but the model reads 3");
  }
}

}  // namespace
}  // namespace birkhoff
