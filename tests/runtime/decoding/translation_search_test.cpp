// Beam search with a model of pairs: caches whose rows are reordered and dropped give the best of
// all targets, as scored by one pass over each whole target.
//
// Legend: B batch, S tokens of a source, T tokens of a target, V vocabulary.
#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "configs/loader/config_io.h"
#include "models/translation_model.h"
#include "runtime/decoding/sequence_search.h"
#include "runtime/tasks/task.h"

namespace birkhoff {
namespace {

using Ids = std::vector<std::int32_t>;

constexpr std::int64_t kNumIds = 5, kLongestTarget = 3;
constexpr std::int32_t kEndMark = 1;

std::unique_ptr<Model> make_pair_model() {
  const configs::Config config = parse_config(
      "task { translation {} } data { corpus: 'none' sequence_length: 8 } train { precision: fp64 } "
      "model { layers: 2 channels: 8 heads: 2 bias: true }",
      "test", {});
  std::unique_ptr<Model> model = make_task(config)->make_model(
      {.vocabulary = kNumIds, .source_vocabulary = kNumIds, .class_names = {}}, at::kCPU);
  const c10::AutoGradMode no_gradients(false);
  // So that probabilities differ much.
  for (const Parameter& parameter : model->parameters().list()) parameter.value.mul_(4);
  return model;
}

Batch sources_of(const std::vector<Ids>& sources) {
  Batch batch;
  std::int64_t longest = 0;
  for (const Ids& source : sources) longest = std::max(longest, std::ssize(source));
  const auto rows = std::ssize(sources);
  const at::Tensor inputs_BS = at::zeros({rows, longest}, at::kLong),
                   lengths_B = at::zeros({rows}, at::kLong);
  for (std::int64_t b = 0; b < rows; ++b) {
    const Ids& source = sources[static_cast<std::size_t>(b)];
    lengths_B[b] = std::ssize(source);
    for (std::size_t s = 0; s < source.size(); ++s)
      inputs_BS[b][static_cast<std::int64_t>(s)] = source[s];
  }
  batch.fields["inputs"] = inputs_BS;
  batch.fields["lengths"] = lengths_B;
  batch.sample_ids_B = at::zeros({rows}, at::kLong);
  return batch;
}

// The log-probability of a whole target.
double log_probability(TranslationModel& model, const Ids& source, const Ids& target) {
  Batch batch = sources_of({source});
  Ids previous = {kEndMark};
  previous.insert(previous.end(), target.begin(), target.end() - 1);
  batch.fields["previous"] = at::tensor(previous, at::kLong).unsqueeze(0);
  batch.fields["mask"] = at::ones_like(batch.fields["previous"], at::kByte);
  const c10::AutoGradMode no_gradients(false);
  const at::Tensor log_p_TV = at::log_softmax(model.logits(batch, std::nullopt)[0], 1);
  double sum = 0;
  for (std::size_t t = 0; t < target.size(); ++t)
    sum += log_p_TV[static_cast<std::int64_t>(t)][target[t]].item<double>();
  return sum;
}

TEST(TranslationSearch, FindsTheBestOfAllTargetsForEachSourceOfABatch) {
  const std::unique_ptr<Model> made = make_pair_model();
  auto& model = dynamic_cast<TranslationModel&>(*made);
  const std::vector<Ids> sources = {{2, 3, 4, 1}, {4, 1}, {0, 2, 2, 3, 4, 0, 1}, {1}, {3, 3, 1}};
  const SearchOptions wide{.beam = 100, .length_penalty = 0.6, .end_mark = kEndMark};
  std::vector<SearchStart> starts;
  for (std::size_t i = 0; i < sources.size(); ++i)
    starts.push_back(
        {.last = kEndMark, .max_tokens = 1 + static_cast<std::int64_t>(i) % kLongestTarget});
  const std::vector<FoundSequence> found =
      find_sequences(model, model.decode_cache(sources_of(sources)), starts, wide);
  for (std::size_t i = 0; i < sources.size(); ++i) {
    FoundSequence best;
    best.score = -INFINITY;
    const std::function<void(const Ids&)> extend = [&](const Ids& ids) {
      for (std::int32_t id = 0; id < kNumIds; ++id) {
        Ids target = ids;
        target.push_back(id);
        if (id != kEndMark && std::ssize(target) < starts[i].max_tokens) {
          extend(target);
          continue;
        }
        const double sum = log_probability(model, sources[i], target),
                     score = sum / std::pow((5.0 + static_cast<double>(target.size())) / 6, 0.6);
        if (score > best.score) best = {target, sum, score};
      }
    };
    extend({});
    EXPECT_EQ(found[i].ids, best.ids) << i;
    EXPECT_NEAR(found[i].score, best.score, 1e-10) << i;  // fp64, in another order
    // A narrow beam finds the same sequence in the batch as by itself, with its score.
    const SearchOptions narrow{.beam = 2, .length_penalty = 0.6, .end_mark = kEndMark};
    const FoundSequence alone = find_sequences(model, model.decode_cache(sources_of({sources[i]})),
                                               {starts[i]}, narrow)[0],
                        together = find_sequences(model, model.decode_cache(sources_of(sources)),
                                                  starts, narrow)[i];
    EXPECT_EQ(alone.ids, together.ids);
    EXPECT_NEAR(alone.log_probability, log_probability(model, sources[i], alone.ids), 1e-10);
    EXPECT_NEAR(together.log_probability, alone.log_probability, 1e-10);
  }
}

}  // namespace
}  // namespace birkhoff
