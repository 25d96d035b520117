// Models that are divided over a tensor-parallel group, against the same models on one rank:
// losses, figures, gradients and the bits of initial values and noise.
//
// Legend: B batch, T tokens.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "cluster/base/error.h"
#include "model_fixture.h"
#include "tests/attention/mechanisms/mechanism_cases.h"
#include "tests/cluster/base/thread_group.h"
#include "tests/models/placed_tensor.h"

namespace birkhoff {
namespace {

constexpr std::int64_t kLength = 16;

at::Tensor gradient_of(const Parameter& parameter) {
  const at::Tensor& gradient = parameter.value.grad();
  return gradient.defined() ? gradient.clone() : at::zeros_like(parameter.value.detach());
}

struct Problem {
  std::string task = "language_model {}", model;
  std::vector<std::string> settings = {};
  Batch batch;
  bool noisy = true;
  bool enlarged = true;

  // The model has 4 heads, 16 channels and two layers.
  TestModel make(const ModelPlacement& place) const {
    std::vector<std::string> all = {"model.channels=16", "model.heads=4"};
    all.insert(all.end(), settings.begin(), settings.end());
    TestModel made = make_test_model_of(task, model, all, place);
    if (enlarged) enlarge_parameters(*made.model);
    return made;
  }
  LossSums backward(const TestModel& made) const {
    const auto noise = noisy ? std::optional(make_noise(batch)) : std::nullopt;
    LossSums sums = made.model->loss_sums(batch, noise);
    sums.loss.backward();
    return sums;
  }
};

Batch texts() {
  Batch batch = make_batch(3, kLength, 21);
  batch.fields.erase("targets");
  batch.fields.erase("mask");
  batch.fields["lengths"] = at::tensor({16, 1, 12}, at::kLong);
  batch.fields["labels"] = at::arange(3, at::kLong);
  return batch;
}

Batch images(std::int64_t rows, std::int64_t columns) {
  Batch batch;
  batch.fields["images"] =
      (test_ids(3, rows * columns, 21) * 23).to(at::kByte).view({3, rows, columns, 1});
  batch.fields["labels"] = at::arange(3, at::kLong);
  batch.sample_ids_B = at::arange(3, at::kLong) + 100;
  return batch;
}

// Sources of up to 13 tokens and targets of up to 10.
Batch pairs() {
  Batch batch = make_batch(3, 13, 21);
  batch.fields["lengths"] = at::tensor({13, 1, 8}, at::kLong);
  batch.fields["previous"] = test_ids(3, 10, 23);
  batch.fields["targets"] = test_ids(3, 10, 24);
  batch.fields["mask"] =
      at::arange(10).unsqueeze(0).lt(at::tensor({10, 4, 1}, at::kLong).unsqueeze(1)).to(at::kByte);
  return batch;
}

void expect_near(const at::Tensor& actual, const at::Tensor& expected, double tolerance,
                 const std::string& what) {
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  if (actual.numel() == 0) return;
  EXPECT_LE(greatest_difference(actual.to(at::kDouble), expected.to(at::kDouble)),
            tolerance * std::max(1.0, expected.abs().max().item<double>()))
      << what;
}

// Compares each rank's sums, values and gradients with those of one rank.
void expect_equal_to_one_rank(const Problem& problem, int ranks, double tolerance) {
  const TestModel whole = problem.make(at::kCPU);
  const LossSums sums = problem.backward(whole);
  std::map<std::string, const Parameter*> parameters;
  for (const Parameter& p : whole.model->parameters().list()) parameters[p.name] = &p;
  run_ranks(ranks, [&](ProcessGroup& group) {
    const TestModel part = problem.make({at::kCPU, &group});
    const LossSums mine = problem.backward(part);
    expect_near(mine.nats, sums.nats, tolerance, "nats");
    EXPECT_EQ(mine.count.item<double>(), sums.count.item<double>());
    ASSERT_EQ(mine.named.size(), sums.named.size());
    for (std::size_t i = 0; i < sums.named.size(); ++i) {
      const auto& [name, value] = mine.named[i];
      at::Tensor expected = sums.named[i].second;
      EXPECT_EQ(name, sums.named[i].first);
      if (value.dim() > 0) {  // of the rank's heads
        expected = expected.narrow(0, group.rank() * value.size(0), value.size(0));
      }
      expect_near(value, expected, tolerance, name);
    }
    EXPECT_EQ(part.model->parameters().num_elements(), whole.model->parameters().num_elements());
    EXPECT_DOUBLE_EQ(part.model->forward_flops_per_sequence(),
                     whole.model->forward_flops_per_sequence());
    std::int64_t elements = 0;
    for (const Parameter& p : part.model->parameters().list()) {
      const Parameter& of_whole = *parameters.at(p.name);
      EXPECT_TRUE(at::equal(p.value, part_of(of_whole.value, p.placement))) << p.name;
      const at::Tensor gradient = gradient_of(p);
      if (p.placement.is_whole()) group.all_reduce(gradient, ReduceOp::kSum, "gradient");
      expect_near(gradient, part_of(gradient_of(of_whole), p.placement), tolerance,
                  "gradient of " + p.name);
      elements += p.value.numel();
    }
    // Embeddings and the weights of layers are divided.
    EXPECT_LT(elements, whole.model->parameters().num_elements() * 0.7);
  });
}

std::string attention(const std::string& mechanism) {
  return "attention { group { mechanism { " + mechanism + " } } }";
}

const std::string kDropout =
    " dropout { embedding: 0.2 residual: 0.3 activation: 0.1 token: 0.2 } ";

class EachMechanism : public ::testing::TestWithParam<test::MechanismCase> {};
INSTANTIATE_TEST_SUITE_P(TensorParallel, EachMechanism, ::testing::ValuesIn(test::all_cases()),
                         test::name_of);

TEST_P(EachMechanism, ComputesTheSameOnTwoAndFourRanks) {
  const test::MechanismCase& each = GetParam();
  const bool noisy =
      test::has_noise(each, test::Built(each.config, each.causal, at::kDouble).traits);
  Problem problem;
  problem.task = each.causal ? "language_model {}" : "classification { classes: 3 }";
  problem.batch = each.causal ? make_batch(3, kLength) : texts();
  const configs::Mechanism config = noisy ? test::with_noise(each.config) : each.config;
  problem.model = attention(config.ShortDebugString()) + (noisy ? kDropout : "") + " bias: true";
  problem.noisy = noisy;
  for (const int ranks : {2, 4}) expect_equal_to_one_rank(problem, ranks, 1e-10);
  // Rounding may change what is chosen.
  if (test::Built(each.config, each.causal, at::kDouble).traits.discontinuous) return;
  problem.settings = {"train.precision=fp32"};
  problem.enlarged = false;  // scores of thousands would enlarge a rounding
  expect_equal_to_one_rank(problem, 2, 1e-5);
}

// Values of images in decoders, patches in encoders.
TEST_P(EachMechanism, ComputesTheSameOnImages) {
  const test::MechanismCase& each = GetParam();
  Problem problem;
  problem.task =
      each.causal ? "pixel_model {}" : "image_classification { classes: 3 patch: 1 pooling: mean }";
  problem.batch = images(4, 4);
  problem.model = attention(each.config.ShortDebugString()) + kDropout +
                  "positions: " + (each.causal ? "image_axes" : "learned") + " bias: true";
  expect_equal_to_one_rank(problem, 2, 1e-10);
}

// On the side of a model of pairs where it may be, and as cross-attention.
TEST_P(EachMechanism, ComputesTheSameOnPairs) {
  const test::MechanismCase& each = GetParam();
  const MechanismTraits traits = test::Built(each.config, each.causal, at::kDouble).traits;
  const std::string mechanism = attention(each.config.ShortDebugString());
  Problem problem{.task = "translation {}",
                  .model = each.causal ? mechanism : "encoder { " + mechanism + " }",
                  .batch = pairs()};
  problem.model += kDropout + "bias: true";
  expect_equal_to_one_rank(problem, 2, 1e-10);
  if (each.causal || !traits.supports_cross_attention) return;
  problem.model = "encoder { cross_" + mechanism + " }" + kDropout + "bias: true";
  expect_equal_to_one_rank(problem, 2, 1e-10);
}

TEST(TensorParallel, OfPairsWithOneTableOrThree) {
  for (const char* tables :
       {"tie_embeddings: false", "encoder { share_embedding: true }",
        "embedding_channels: 6 norm: post encoder { share_embedding: true }"}) {
    for (const int ranks : {2, 4}) {
      expect_equal_to_one_rank({.task = "translation { label_smoothing: 0.3 target_length: 12 }",
                                .model = tables + kDropout,
                                .settings = {"train.recompute=true"},
                                .batch = pairs()},
                               ranks, 1e-10);
    }
  }
}

TEST(TensorParallel, OfTwoTowersWithClassWeights) {
  Batch batch = texts();
  batch.fields["inputs"] = test_ids(6, kLength, 21).view({3, 2, kLength});
  batch.fields["lengths"] = at::tensor({16, 5, 1, 12, 7, 7}, at::kLong).view({3, 2});
  for (const char* mechanism :
       {"routing { clusters: 2 window: 8 commitment: 0.5 }", "sinkhorn { block: 4 }"}) {
    for (const int ranks : {2, 4}) {
      expect_equal_to_one_rank(
          {.task = "classification { classes: 3 second_stream: 'b' pair_model: two_towers "
                   "class_weight: 2 class_weight: 0.5 class_weight: 1 }",
           .model = attention(mechanism) + kDropout + " bias: true",
           .settings = {"train.recompute=true"},
           .batch = batch},
          ranks, 1e-10);
    }
  }
}

TEST(TensorParallel, OfImagesWithAClassToken) {
  for (const char* pooling : {"class_token", "max"}) {
    const bool token = std::string(pooling) == "class_token";
    for (const int ranks : {2, 4}) {
      expect_equal_to_one_rank(
          {.task = "image_classification { classes: 3 patch: 2 pooling: " + std::string(pooling) +
                   " pixel_mean: 0.1 pixel_std: 0.3 }",
           .model = attention("dense {}") + kDropout,
           .settings = {std::string("data.sequence_length=") + (token ? "7" : "6"),
                        "train.recompute=true"},
           .batch = images(4, 6)},
          ranks, 1e-10);
    }
  }
}

TEST(TensorParallel, OfEachKindOfModel) {
  const std::string dense = attention("dense { dropout: 0.2 }");
  const std::string variants[] = {
      dense + "activation: geglu positions: learned tie_embeddings: false bias: true",
      dense + "embedding_channels: 6 positions: sinusoidal scale_embeddings: true",
      dense + "norm: post bias: true", dense + "positions: relative_sinusoidal",
      attention("dense { normalizer: entmax }") + "positions: relative_sinusoidal norm: post",
      "norm: post head_channels: 6 attention { group { heads: 2 mechanism { sinkhorn { block: 4 } } "
      "} group { heads: 2 key_heads: 2 mechanism { dense {} } } }",
      dense + "feed_forward: 20",  // parts of hidden units begin within a counter of the noise
      // Several sections of queries, keys, values and outputs.
      "attention { group { heads: 2 mechanism { sinkhorn { block: 4 tie_key_value: true "
      "gumbel_noise: true dropout: 0.2 } } }"
      "            group { heads: 2 key_heads: 2 mechanism { routing { clusters: 2 "
      "share_query_key: true dropout: 0.2 } } } }",
      "attention { group { key_heads: 2 mechanism { sink: true moba { block: 4 top_blocks: 2 "
      "dropout: 0.2 } } } }",
      "attention { group { key_heads: 2 mechanism { sliding_window { width: 5 dropout: 0.2 } "
      "relative_positions { max_distance: 5 per_head: true } } } }"};
  for (const std::string& variant : variants) {
    SCOPED_TRACE(variant);
    expect_equal_to_one_rank({.model = variant + kDropout, .batch = make_batch(3, 14)}, 2, 1e-10);
  }
  expect_equal_to_one_rank({.model = dense + "attention_only: true head_channels: 3 dropout { "
                                             "embedding: 0.2 residual: 0.3 }",
                            .batch = make_batch(3, 14)},
                           2, 1e-10);
}

TEST(TensorParallel, WithRecomputationAndInFp32) {
  const std::string model =
      "attention { group { mechanism { sinkhorn { block: 4 gumbel_noise: true dropout: 0.2 } } } } "
      "bias: true" +
      kDropout;
  const auto problem = [&](std::vector<std::string> settings) {
    return Problem{.model = model, .settings = std::move(settings), .batch = make_batch(2, 16)};
  };
  expect_equal_to_one_rank(problem({"train.recompute=true"}), 2, 1e-10);
  expect_equal_to_one_rank(problem({"train.recompute=true", "model.norm=post"}), 2, 1e-10);
  expect_equal_to_one_rank(problem({"train.precision=fp32"}), 4, 1e-5);
}

// Rounding to bf16 happens at other points, so the results of one rank are no reference: both are
// compared with fp64, by the norm of all errors of a tensor. The largest error of a few elements
// would be a matter of luck.
void check_bf16(const std::string& norm, int ranks, std::int64_t tokens) {
  const auto problem = [&](const std::string& precision) {
    return Problem{.model = attention("block_local { block: 4 look_back: 1 }") + "bias: true",
                   .settings = {"train.precision=" + precision, "model.norm=" + norm},
                   .batch = make_batch(2, tokens)};
  };
  const TestModel exact = problem("fp64").make(at::kCPU), whole = problem("bf16").make(at::kCPU);
  const double nats = problem("fp64").backward(exact).nats.item<double>();
  problem("bf16").backward(whole);
  std::map<std::string, std::pair<at::Tensor, at::Tensor>> expected;  // and one rank's errors
  for (std::size_t i = 0; i < exact.model->parameters().list().size(); ++i) {
    const Parameter& p = exact.model->parameters().list()[i];
    const at::Tensor of_whole = gradient_of(whole.model->parameters().list()[i]);
    expected[p.name] = {gradient_of(p), of_whole.to(at::kDouble) - gradient_of(p)};
  }
  run_ranks(ranks, [&](ProcessGroup& group) {
    const TestModel part = problem("bf16").make({at::kCPU, &group});
    EXPECT_NEAR(problem("bf16").backward(part).nats.item<double>(), nats, 1e-2 * nats);
    for (const Parameter& p : part.model->parameters().list()) {
      const auto& [gradient, errors] = expected.at(p.name);
      const at::Tensor mine = gradient_of(p);
      if (p.placement.is_whole()) group.all_reduce(mine, ReduceOp::kSum, "gradient");
      const at::Tensor own_errors = mine.to(at::kDouble) - part_of(gradient, p.placement);
      EXPECT_LE(own_errors.norm().item<double>(),
                3 * part_of(errors, p.placement).norm().item<double>())
          << p.name;
    }
  });
}

TEST(TensorParallel, Bf16IsAsCloseToFp64AsOnOneRank) {
  check_bf16("pre", 2, 16);
  check_bf16("post", 2, 16);
  check_bf16("pre", 4, 13);  // the last slice is not full
}

// Fewer tokens than ranks, and more ids than the last rank's share.
TEST(TensorParallel, OfFewTokens) {
  expect_equal_to_one_rank({.model = attention("dense {}"), .batch = make_batch(1, 3)}, 4, 1e-10);
  expect_equal_to_one_rank({.model = attention("dense {}"), .batch = make_batch(1, 1)}, 2, 1e-10);
}

TEST(TensorParallel, OfPackedDocumentsAndMaskedTargets) {
  Problem problem{
      .model = attention("block_local { block: 4 look_back: 1 }") + "positions: learned",
      .batch = make_batch(2, 16)};
  problem.batch.fields["segments"] =
      at::arange(16, at::kInt).div(5, "floor").unsqueeze(0).repeat({2, 1});
  problem.batch.fields["positions"] =
      at::arange(16, at::kLong).remainder(5).unsqueeze(0).repeat({2, 1});
  problem.batch.fields["mask"].narrow(1, 3, 4).zero_();
  problem.batch.fields["targets"].narrow(1, 3, 4).fill_(-7);  // never read
  expect_equal_to_one_rank(problem, 4, 1e-10);
}

TEST(TensorParallel, LogitsAndDecodingAreThoseOfOneRank) {
  const Problem problem{.model = attention("sinkhorn { block: 4 }"), .batch = make_batch(3, 16)};
  const TestModel whole = problem.make(at::kCPU);
  const at::Tensor expected_BTV = whole->logits(problem.batch, std::nullopt).detach();
  run_ranks(4, [&](ProcessGroup& group) {
    const TestModel part = problem.make({at::kCPU, &group});
    EXPECT_LE(greatest_difference(part->logits(problem.batch, std::nullopt), expected_BTV), 1e-10);
    const auto cache = part->decode_cache(3);
    for (std::int64_t t = 0; t < 16; ++t) {
      const at::Tensor logits_BV =
          part->decode_step(*cache, problem.batch.fields.at("inputs").select(1, t));
      EXPECT_LE(greatest_difference(logits_BV, expected_BTV.select(1, t)), 1e-10) << t;
    }
  });
}

// An evaluation that does not hold all logits at a time.
TEST(TensorParallel, AnEvaluationOfManyIdsIsTheSame) {
  const configs::Config config = parse_config(
      "task { language_model {} } data { corpus: 'none' sequence_length: 16 } "
      "model { layers: 1 channels: 8 heads: 2 }",
      "test", {});
  constexpr std::int64_t kIds = 150001;
  Batch batch = make_batch(64, 16);
  batch.fields["targets"] = batch.fields["targets"] * 13001;
  const at::NoGradGuard no_grad;
  const LossSums expected = make_model(config, kIds, at::kCPU)->loss_sums(batch, std::nullopt);
  run_ranks(2, [&](ProcessGroup& group) {
    const at::NoGradGuard of_thread;
    const auto part = make_model(config, kIds, {at::kCPU, &group});
    const LossSums found = part->loss_sums(batch, std::nullopt);
    expect_near(found.nats, expected.nats, 1e-6, "nats");
    EXPECT_LE(greatest_difference(found.nats_N, expected.nats_N), 1e-5);  // fp32
  });
}

// An encoder, and a decoder that reads its outputs.
void check_two_stacks(const std::string& norm) {
  const configs::Config config = parse_config(
      "task { translation {} } data { corpus: 'none' sequence_length: 16 } "
      "train { precision: fp64 } model { layers: 2 channels: 16 heads: 4 bias: true " +
          kDropout +
          " encoder { cross_attention { group { mechanism { sortcut { blocks: 2 sinkhorn { "
          "block: 4 gumbel_noise: true } } } } } } }",
      "test", {"model.norm=" + norm});
  Batch source = make_batch(2, 13, 5);
  source.fields["lengths"] = at::tensor({13, 6}, at::kLong);
  const Batch target = make_batch(2, 10, 7);
  struct Stacks {
    Stacks(const configs::Config& config, const ModelPlacement& place)
        : parameters(make_parameters(config, place)),
          encoder(config, StackRole::kSourceEncoder, parameters),
          decoder(config, StackRole::kTargetDecoder, parameters) {
      for (const Parameter& p : parameters.list()) {
        if (p.value.dim() > 1) p.value.detach().mul_(15);
      }
    }
    Parameters parameters;
    TokenStack encoder, decoder;
  };
  const auto outputs = [&](const Stacks& stacks) {
    NamedSums sums;
    const Memory memory = stacks.encoder.encode(source, make_noise(source), sums);
    return stacks.decoder.forward(target, make_noise(target), sums, memory);
  };
  const Stacks whole(config, at::kCPU);
  const at::Tensor expected = outputs(whole);
  expected.sin().sum().backward();
  run_ranks(2, [&](ProcessGroup& group) {
    const Stacks part(config, {at::kCPU, &group});
    const at::Tensor actual = outputs(part);
    expect_near(actual, expected, 1e-10, "outputs");
    // Each rank's loss is a part of the whole one.
    const at::Tensor mine = at::arange(2, at::kLong).eq(group.rank()).view({2, 1, 1});
    (actual.sin() * mine).sum().backward();
    for (std::size_t i = 0; i < whole.parameters.list().size(); ++i) {
      const Parameter& p = part.parameters.list()[i];
      const at::Tensor gradient = gradient_of(p);
      if (p.placement.is_whole()) group.all_reduce(gradient, ReduceOp::kSum, "gradient");
      expect_near(gradient, part_of(gradient_of(whole.parameters.list()[i]), p.placement), 1e-10,
                  p.name);
    }
    NamedSums sums;
    const at::NoGradGuard no_grad;
    const Memory memory = part.encoder.encode(source, std::nullopt, sums);
    const auto cache = part.decoder.stack.decode_cache(2, memory);
    const at::Tensor all = part.decoder.forward(target, std::nullopt, sums, memory);
    for (std::int64_t t = 0; t < 10; ++t) {
      const at::Tensor x =
          part.decoder.decode_step(*cache, target.fields.at("inputs").select(1, t));
      expect_near(x.select(1, 0), all.select(1, t), 1e-10, "decoded");
    }
  });
}

TEST(TensorParallel, OfTwoStacks) {
  check_two_stacks("pre");
  check_two_stacks("post");
}

TEST(TensorParallel, MoreRanksThanIdsAreRefused) {
  const configs::Config config = parse_config(
      "task { language_model {} } data { corpus: 'none' sequence_length: 16 } "
      "model { layers: 1 channels: 16 heads: 4 }",
      "test", {});
  run_ranks(4, [&](ProcessGroup& group) {
    try {
      make_model(config, 3, {at::kCPU, &group});
      ADD_FAILURE() << "not refused";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kConfig);
      EXPECT_NE(std::string(error.what()).find("4 ranks cannot divide a vocabulary of 3 ids"),
                std::string::npos);
    }
  });
}

}  // namespace
}  // namespace birkhoff
