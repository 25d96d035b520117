// Transformer-XL's recurrence: sequences that see the ones before them through a memory, against
// passes over the whole text.
//
// Legend: B batch, T tokens, V vocabulary, N layers, M tokens of the memory, C channels.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "tests/models/model_fixture.h"

namespace birkhoff {
namespace {

constexpr std::int64_t kText = 64;

const std::string kModels[] = {
    "positions: relative_sinusoidal bias: true",
    "positions: relative_sinusoidal norm: post attention { group { mechanism { dense { normalizer: "
    "top_k kept_keys: 4 } } } }",
    "positions: relative_sinusoidal attention { group { heads: 1 mechanism { dense { normalizer: "
    "entmax15 } } } group { mechanism { sink: true dense {} } } }"};

TestModel make(const std::string& text, std::int64_t memory, std::vector<std::string> more = {}) {
  more.push_back("model.memory.length=" + std::to_string(memory));
  TestModel model = make_test_model(text, more);
  enlarge_parameters(*model.model);
  return model;
}

Batch tokens_of(const Batch& text, std::int64_t begin, std::int64_t end) {
  Batch part = text;
  for (const char* name : {"inputs", "targets", "mask"}) {
    part.fields[name] = text.at(name).narrow(1, begin, end - begin);
  }
  return part;
}

// The nats of the targets in [begin, end) by these logits [B, T, V].
double nats_of(const at::Tensor& logits_BTV, const Batch& text, std::int64_t begin,
               std::int64_t end) {
  const at::Tensor targets_BT1 = text.at("targets").narrow(1, begin, end - begin).unsqueeze(2);
  return -at::log_softmax(logits_BTV, 2).gather(2, targets_BT1).sum().item<double>();
}

// The nats of each segment of the text, which is read from left to right.
std::vector<double> read_in_segments(const TestModel& model, const Batch& text,
                                     std::int64_t segment) {
  std::vector<double> nats;
  at::Tensor past;
  for (std::int64_t begin = 0; begin < kText; begin += segment) {
    Batch part = tokens_of(text, begin, std::min(begin + segment, kText));
    if (past.defined()) part.fields["past"] = past;
    const LossSums sums = model->loss_sums(part, std::nullopt);
    EXPECT_FALSE(sums.past_BNMC.requires_grad());
    past = sums.past_BNMC;
    nats.push_back(sums.nats.item<double>());
  }
  return nats;
}

// Inputs of layers are cached, so a memory of all earlier tokens is the whole context at any depth.
TEST(Past, ALongMemoryIsTheWholeContext) {
  const Batch text = make_batch(3, kText, 4);
  for (const std::string& form : kModels) {
    const TestModel model = make(form, 48, {"model.layers=3"});
    const at::Tensor logits_BTV = model->logits(text, std::nullopt);
    for (const std::int64_t segment : {16, 13, 5}) {
      const std::vector<double> nats = read_in_segments(model, text, segment);
      // 64 tokens are more than a memory of 48 and a segment of less than 16.
      const std::int64_t covered = 48 + segment;
      for (std::int64_t i = 0; i < std::ssize(nats); ++i) {
        const std::int64_t begin = i * segment, end = std::min(begin + segment, kText);
        if (end > covered) break;
        EXPECT_NEAR(nats[static_cast<std::size_t>(i)],
                    nats_of(logits_BTV.narrow(1, begin, end - begin), text, begin, end), 1e-10)
            << form << segment << " " << i;
      }
    }
  }
}

// What token t sees, as first(t): the sum over all tokens of passes over [first(t), t] alone.
double nats_of_contexts(const TestModel& model, const Batch& text,
                        const std::function<std::int64_t(std::int64_t)>& first) {
  double nats = 0;
  for (std::int64_t t = 0; t < kText; ++t) {
    const Batch context = tokens_of(text, first(t), t + 1);
    const at::Tensor logits_BTV = model->logits(context, std::nullopt);
    nats += nats_of(logits_BTV.narrow(1, logits_BTV.size(1) - 1, 1), text, t, t + 1);
  }
  return nats;
}

double total(const std::vector<double>& nats) {
  double sum = 0;
  for (const double each : nats) sum += each;
  return sum;
}

// In one layer the inputs are embeddings, which know no context.
TEST(Past, AShortMemoryShowsTheLastTokensInOneLayer) {
  const Batch text = make_batch(2, kText, 4);
  for (const std::string& form : kModels) {
    const TestModel model = make(form, 10, {"model.layers=1"});
    for (const std::int64_t segment : {16, 5}) {
      const double expected = nats_of_contexts(model, text, [&](std::int64_t t) {
        return std::max<std::int64_t>(t / segment * segment - 10, 0);
      });
      EXPECT_NEAR(total(read_in_segments(model, text, segment)), expected, 1e-9) << form;
    }
  }
}

TEST(Past, EvaluationHasAMemoryOfItsOwn) {
  const Batch text = make_batch(2, kText, 4);
  for (const bool same : {false, true}) {
    const TestModel model =
        make(kModels[0], 3,
             {"model.layers=1", "model.memory.evaluation_length=20",
              std::string("model.memory.evaluation_same_length=") + (same ? "true" : "false")});
    const std::int64_t segment = 7;
    const double expected = nats_of_contexts(model, text, [&](std::int64_t t) {
      return std::max<std::int64_t>(same ? t - 19 : t / segment * segment - 20, 0);
    });
    EXPECT_NEAR(total(read_in_segments(model, text, segment)), expected, 1e-9);
    // Training keeps 3 tokens.
    const Batch part = tokens_of(text, 0, 16);
    EXPECT_EQ(model->loss_sums(part, make_noise(part)).past_BNMC.sizes(),
              (at::IntArrayRef{2, 1, 3, 8}));
    EXPECT_EQ(model->past_shape(), (std::vector<std::int64_t>{1, 3, 8}));
  }
}

TEST(Past, HasNoGradientsAndRecomputationHasTheSameBits) {
  const Batch text = make_batch(4, kText, 4);
  const std::vector<std::string> settings = {"model.dropout.residual=0.2"};
  std::vector<std::string> recompute = settings;
  recompute.push_back("train.recompute=true");
  for (const std::string& form : kModels) {
    const TestModel plain = make(form, 24, settings), recomputing = make(form, 24, recompute);
    at::Tensor past;
    for (std::int64_t begin = 0; begin < 32; begin += 16) {
      Batch part = tokens_of(text, begin, begin + 16);
      if (past.defined()) part.fields["past"] = past;
      const LossSums sums = plain->loss_sums(part, make_noise(part)),
                     again = recomputing->loss_sums(part, make_noise(part));
      sums.loss.backward();
      again.loss.backward();
      EXPECT_TRUE(at::equal(sums.loss, again.loss));
      EXPECT_TRUE(at::equal(sums.past_BNMC, again.past_BNMC));
      past = sums.past_BNMC;
      EXPECT_FALSE(past.requires_grad());
    }
    for (const Parameter& each : plain->parameters().list()) {
      EXPECT_TRUE(at::equal(each.value.grad(), parameter_of(*recomputing.model, each.name).grad()))
          << each.name;
    }
  }
}

// The memory reaches the parameters' gradients through its keys and values.
TEST(Past, GradientsEqualFiniteDifferences) {
  const Batch text = make_batch(2, kText, 4);
  for (const std::string& form : kModels) {
    const TestModel model = make(form, 24);
    Batch part = tokens_of(text, 16, 32);
    part.fields["past"] = model->loss_sums(tokens_of(text, 0, 16), std::nullopt).past_BNMC.clone();
    model->loss_sums(part, std::nullopt).loss.backward();
    for (const Parameter& p : model->parameters().list()) {
      const at::Tensor direction =
          at::arange(p.value.numel(), at::kDouble).add(0.3).mul(2.3).sin().view(p.value.sizes());
      const at::Tensor value = p.value.detach(), start = value.clone();
      constexpr double kStep = 1e-5;
      const auto loss_at = [&](double distance) {
        value.copy_(start + distance * direction);
        return model->loss_sums(part, std::nullopt).loss.item<double>();
      };
      const double numeric = (loss_at(kStep) - loss_at(-kStep)) / (2 * kStep);
      value.copy_(start);
      const double analytic = (p.value.grad() * direction).sum().item<double>();
      EXPECT_NEAR(numeric, analytic, 1e-6 * (1 + std::abs(analytic))) << form << p.name;
    }
  }
}

TEST(Past, RowsDoNotDependOnTheirBatch) {
  const Batch text = make_batch(3, kText, 4);
  const TestModel model = make(kModels[0], 24);
  const Batch first = tokens_of(text, 0, 16);
  Batch second = tokens_of(text, 16, 32);
  const at::Tensor past = model->loss_sums(first, std::nullopt).past_BNMC;
  second.fields["past"] = past;
  const LossSums all = model->loss_sums(second, std::nullopt);
  double nats = 0;
  for (std::int64_t row = 0; row < 3; ++row) {
    const LossSums alone = model->loss_sums(second.narrow(row, row + 1), std::nullopt);
    EXPECT_LE(greatest_difference(alone.past_BNMC, all.past_BNMC.narrow(0, row, 1)), 1e-12);
    nats += alone.nats.item<double>();
  }
  EXPECT_NEAR(nats, all.nats.item<double>(), 1e-10);
}

TEST(Past, DecodingSeesTheMemoryAndTheSequence) {
  const Batch text = make_batch(2, kText, 4);
  for (const std::vector<std::string>& more :
       {std::vector<std::string>{},
        {"model.memory.evaluation_clamp=9", "model.memory.evaluation_same_length=true"}}) {
    for (const std::string& form : kModels) {
      const TestModel model = make(form, 48, more);
      EXPECT_EQ(model->max_tokens(), kText);
      const at::Tensor logits_BTV = model->logits(text, std::nullopt);
      const auto cache = model->decode_cache(2);
      for (std::int64_t t = 0; t < kText; ++t) {
        const at::Tensor next_BV = model->decode_step(*cache, text.at("inputs").select(1, t));
        EXPECT_LE(greatest_difference(logits_BTV.select(1, t), next_BV), 1e-10) << t;
      }
    }
  }
}

TEST(Past, FlopsEqualTheHandCount) {
  const TestModel model = make("positions: relative_sinusoidal", 24, {"model.layers=1"}),
                  without = make("positions: relative_sinusoidal", 0, {"model.layers=1"});
  // Keys and values of 24 tokens; and for 16 x 24 pairs of 8 channels the products with keys, with
  // distances and with values.
  const double more = 2.0 * 24 * 8 * 16 + 2.0 * 16 * 24 * 8 * 3;
  EXPECT_DOUBLE_EQ(model->forward_flops_per_sequence(),
                   without->forward_flops_per_sequence() + more);
}

}  // namespace
}  // namespace birkhoff
