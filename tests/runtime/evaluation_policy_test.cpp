// Evaluation with a stride and with a memory, against passes over each token's context alone.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "cluster/base/interval.h"
#include "configs/loader/config_io.h"
#include "data/corpus/corpus.h"
#include "models/language_model.h"
#include "runtime/evaluator.h"
#include "runtime/tasks/task.h"
#include "tests/cluster/base/thread_group.h"
#include "tests/data/helpers.h"

namespace birkhoff {
namespace {

constexpr std::int64_t kTokens = 118;

class EvaluationPolicy : public testing::Test {
 protected:
  EvaluationPolicy() {
    std::string text;
    for (std::int64_t i = 0; i < kTokens; ++i) text += static_cast<char>('a' + i * i % 23);
    prepare({text});
  }

  // The corpus whose split valid has these documents. Several end in an end mark.
  void prepare(const std::vector<std::string>& documents) {
    const std::string name = fmt::format("corpus-{}", documents.size());
    write_text(folder_ / "train.txt", "some other text of more than a few words");
    PrepareOptions options = prepare_options(folder_ / name, {folder_ / "train.txt"});
    tokens_.clear();
    for (const std::string& text : documents) {
      options.valid_paths.push_back(folder_ /
                                    fmt::format("{}-{}", name, options.valid_paths.size()));
      write_text(options.valid_paths.back(), text);
      for (const char c : text) tokens_.push_back(static_cast<unsigned char>(c));
      if (documents.size() > 1) tokens_.push_back(256);
    }
    prepare_corpus(options);
    corpus_ = std::make_unique<Corpus>(folder_ / name);
  }

  struct Evaluated {
    double nats = 0;
    std::int64_t tokens = 0;
    DocumentSums documents{};
  };

  configs::Config config(const std::vector<std::string>& settings) const {
    return parse_config(
        "task { language_model {} } data { corpus: 'none' sequence_length: 12 } "
        "train { precision: fp64 } model { layers: 1 channels: 8 heads: 2 positions: "
        "relative_sinusoidal } evaluate { micro_batch: 4 }",
        "test", settings);
  }
  std::unique_ptr<Model> make(const configs::Config& config) const {
    std::unique_ptr<Model> model = make_model(config, corpus_->vocabulary(), at::kCPU);
    for (const Parameter& parameter : model->parameters().list()) {
      if (parameter.value.dim() > 1) parameter.value.detach().mul_(15);
    }
    return model;
  }

  // On 1, 2 and 3 ranks, which must agree in each bit.
  Evaluated evaluate(const configs::Config& config, bool by_document = false) const {
    std::vector<Evaluated> all;
    for (const int size : {1, 2, 3}) {
      std::vector<Evaluated> of_ranks(static_cast<std::size_t>(size));
      run_ranks(size, [&](ProcessGroup& group) {
        const std::unique_ptr<Task> task = make_task(config);
        const std::unique_ptr<Model> model = make(config);
        const auto evaluator =
            make_evaluator(*task, config.evaluate(), *corpus_, *model, group, by_document);
        const Evaluation result = *evaluator->run([] { return false; });
        of_ranks[static_cast<std::size_t>(group.rank())] = {
            result.loss * static_cast<double>(result.tokens), result.tokens,
            result.documents.value_or(DocumentSums())};
      });
      all.insert(all.end(), of_ranks.begin(), of_ranks.end());
    }
    for (const Evaluated& each : all) {
      EXPECT_EQ(each.nats, all[0].nats);
      EXPECT_EQ(each.tokens, all[0].tokens);
      EXPECT_EQ(each.documents.nats, all[0].documents.nats);
      EXPECT_EQ(each.documents.targets, all[0].documents.targets);
    }
    return all[0];
  }

  using FirstOf = std::function<std::int64_t(std::int64_t)>;
  // The nats of targets 1, ..., num_targets, where target t is predicted from the tokens
  // [first(t), t) alone.
  std::vector<double> nats_of_targets(const configs::Config& config, std::int64_t num_targets,
                                      const FirstOf& first) const {
    const at::NoGradGuard no_gradients;
    const std::unique_ptr<Model> model = make(config);
    std::vector<double> nats;
    for (std::int64_t t = 1; t <= num_targets; ++t) {
      Batch batch;
      batch.fields["inputs"] =
          at::tensor(tokens_, at::kLong).narrow(0, first(t), t - first(t)).unsqueeze(0);
      batch.sample_ids_B = at::zeros({1}, at::kLong);
      const at::Tensor logits_BTV = model->token_scorer()->logits(batch, std::nullopt);
      nats.push_back(-at::log_softmax(logits_BTV, 2)[0][-1][tokens_[static_cast<std::size_t>(t)]]
                          .item<double>());
    }
    return nats;
  }
  double nats_of_contexts(const configs::Config& config, std::int64_t num_targets,
                          const FirstOf& first) const {
    const std::vector<double> nats = nats_of_targets(config, num_targets, first);
    return std::accumulate(nats.begin(), nats.end(), 0.0);
  }

  std::int64_t num_targets() const { return corpus_->stream("valid", "tokens").elements() - 1; }

  TemporaryFolder folder_;
  std::unique_ptr<Corpus> corpus_;
  std::vector<std::int64_t> tokens_;
};

TEST_F(EvaluationPolicy, AStrideGivesEachTokenALongContext) {
  ASSERT_EQ(num_targets(), kTokens - 1);  // the last window is shorter with each stride but 1
  for (const std::int64_t stride : {1, 5, 9, 12}) {
    const configs::Config with = config({"evaluate.stride=" + std::to_string(stride)});
    const Evaluated result = evaluate(with);
    EXPECT_EQ(result.tokens, num_targets());
    const double expected = nats_of_contexts(with, num_targets(), [&](std::int64_t t) {
      return std::max<std::int64_t>((t - 12 + stride - 1) / stride * stride, 0);
    });
    EXPECT_NEAR(result.nats, expected, 1e-9) << stride;
    // Only the first windows.
    configs::Config some = with;
    some.mutable_evaluate()->set_sequences(3);
    const Evaluated first = evaluate(some);
    EXPECT_EQ(first.tokens, 12 + 2 * stride);
    EXPECT_NEAR(first.nats,
                nats_of_contexts(with, first.tokens,
                                 [&](std::int64_t t) {
                                   return std::max<std::int64_t>(
                                       (t - 12 + stride - 1) / stride * stride, 0);
                                 }),
                1e-9);
  }
  const Evaluated plain = evaluate(config({})), whole = evaluate(config({"evaluate.stride=12"}));
  EXPECT_EQ(plain.nats, whole.nats);
}

// The lanes are parts of the windows of 5 tokens; in one layer the memory is the last tokens.
TEST_F(EvaluationPolicy, AMemoryIsThatOfTheLane) {
  for (const int lanes : {1, 4, 7, 60}) {
    for (const std::int64_t memory : {7, 60}) {
      for (const std::int64_t sequences : {0, 13}) {
        configs::Config with =
            config({"model.memory.length=3", "model.memory.evaluation_sequence_length=5",
                    "model.memory.evaluation_length=" + std::to_string(memory),
                    "evaluate.micro_batch=" + std::to_string(lanes),
                    "evaluate.sequences=" + std::to_string(sequences)});
        const Evaluated result = evaluate(with);
        const std::int64_t all = (num_targets() + 4) / 5, windows = sequences > 0 ? sequences : all;
        EXPECT_EQ(result.tokens, std::min(num_targets(), windows * 5));
        const double expected = nats_of_contexts(with, result.tokens, [&](std::int64_t t) {
          const std::int64_t window = (t - 1) / 5;
          std::int64_t lane_begin = 0;
          for (int lane = 0; lane < lanes; ++lane) {
            // The first lanes have one window more.
            const std::int64_t next =
                lane_begin + windows / lanes + (lane < windows % lanes ? 1 : 0);
            if (window < next) break;
            lane_begin = next;
          }
          return std::max(lane_begin * 5, window * 5 - memory);
        });
        EXPECT_NEAR(result.nats, expected, 1e-9) << lanes << " " << memory << " " << sequences;
      }
    }
  }
}

TEST_F(EvaluationPolicy, TheLossOfEachDocumentIsThatOfItsTokens) {
  const std::vector<std::string> texts = {"a first document, of a few windows of tokens", "b",
                                          "and another document after a very short one"};
  prepare(texts);
  // Windows without a memory, with a stride, and with a memory, which ranks compute alike.
  for (const std::vector<std::string>& settings :
       {std::vector<std::string>{},
        {"evaluate.stride=5"},
        {"evaluate.sequences=3"},
        {"model.memory.length=60", "evaluate.micro_batch=1"},
        {"model.memory.length=60", "evaluate.micro_batch=2"}}) {
    const configs::Config with = config(settings);
    const Evaluated result = evaluate(with, /*by_document=*/true);
    const std::int64_t stride = with.evaluate().stride() > 0 ? with.evaluate().stride() : 12;
    const bool has_memory = with.model().memory().length() > 0;
    const std::vector<double> nats =
        nats_of_targets(with, result.tokens, [&](std::int64_t t) -> std::int64_t {
          if (has_memory) {
            // Of two lanes, the first may have a window more.
            const std::int64_t windows = (result.tokens + 11) / 12, window = (t - 1) / 12;
            const std::int64_t second = with.evaluate().micro_batch() == 2 ? (windows + 1) / 2 : 0;
            return std::max(window * 12 - 60, window < second ? 0 : second * 12);
          }
          return std::max<std::int64_t>((t - 12 + stride - 1) / stride * stride, 0);
        });
    ASSERT_EQ(result.documents.nats.size(), texts.size());
    std::int64_t begin = 0;
    for (std::size_t i = 0; i < texts.size(); ++i) {
      const std::int64_t end = begin + std::ssize(texts[i]) + 1;
      double expected = 0;
      std::int64_t targets = 0;
      // The first token of all is no target.
      for (std::int64_t t = std::max<std::int64_t>(begin, 1); t < std::min(end, result.tokens + 1);
           ++t, ++targets)
        expected += nats[static_cast<std::size_t>(t) - 1];
      EXPECT_EQ(result.documents.targets[i], targets) << i;
      EXPECT_NEAR(result.documents.nats[i], expected, 50 * 0x1p-25) << i;
      begin = end;
    }
  }
}

}  // namespace
}  // namespace birkhoff
