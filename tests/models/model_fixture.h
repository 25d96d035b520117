// Small models and batches for the tests of models.
//
// Legend: B batch, T tokens.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <string>

#include "configs/loader/config_io.h"
#include "models/embeddings/token_embedding.h"
#include "models/language_model.h"
#include "models/sequence_classifier.h"
#include "models/transformer/stack.h"
#include "runtime/tasks/task.h"

namespace birkhoff {

inline constexpr std::int64_t kVocabulary = 11;

struct TestModel {
  std::unique_ptr<Model> model;

  LanguageModel* operator->() const { return dynamic_cast<LanguageModel*>(model.get()); }
};

inline TestModel make_test_model_of(const std::string& task, const std::string& model_text,
                                    const std::vector<std::string>& settings,
                                    const ModelPlacement& place) {
  const std::string text =
      "task { " + task +
      " } data { corpus: 'none' sequence_length: 16 } train { precision: fp64 } "
      "model { layers: 2 channels: 8 heads: 2 " +
      model_text + " }";
  return {make_model(parse_config(text, "test", settings), kVocabulary, place)};
}

// A stack of a model of tokens, with its embeddings.
struct TokenStack {
  TokenStack(const configs::Config& config, StackRole role, Parameters& of_model)
      : parameters(of_model),
        embedding(config, role, kVocabulary, of_model),
        stack(config, role, of_model) {}

  at::Tensor forward(const Batch& batch, const std::optional<NoiseKey>& noise, NamedSums& sums,
                     const Memory& memory = {}) const {
    const TokenSlices tokens = token_slices(batch, parameters);
    SequenceContext context = token_context(batch, tokens);
    context.memory = memory;
    return tokens.gather(stack.forward(embedding(batch, tokens, noise), context, noise, sums));
  }
  Memory encode(const Batch& batch, const std::optional<NoiseKey>& noise, NamedSums& sums) const {
    const TokenSlices tokens = token_slices(batch, parameters);
    return stack.encode(embedding(batch, tokens, noise), token_context(batch, tokens), noise, sums);
  }
  at::Tensor decode_step(DecodeCache& cache, const at::Tensor& tokens_B) const {
    const at::Tensor tokens_BT = tokens_B.unsqueeze(1);
    const TokenSlices tokens(parameters.place(), tokens_B.size(0), 1);
    return tokens.gather(stack.decode_step(
        cache, embedding.embed(tokens_BT, at::full_like(tokens_BT, cache.length()), tokens),
        tokens));
  }

  Parameters& parameters;
  TokenEmbedding embedding;
  Stack stack;
};

// Two layers, 8 channels, 2 heads, 16 tokens, fp64. `settings` may change any of these.
inline TestModel make_test_model(const std::string& model_text,
                                 const std::vector<std::string>& settings = {},
                                 const ModelPlacement& place = at::kCPU) {
  return make_test_model_of("language_model {}", model_text, settings, place);
}

// The same sizes, and three classes.
inline TestModel make_test_classifier(const std::string& model_text,
                                      const std::vector<std::string>& settings = {},
                                      const ModelPlacement& place = at::kCPU) {
  return make_test_model_of("classification { classes: 3 }", model_text, settings, place);
}

// Initial weights are small; larger weights make every part affect the outputs.
inline void enlarge_parameters(Model& model) {
  for (const Parameter& parameter : model.parameters().list()) {
    if (parameter.value.dim() > 1) parameter.value.detach().mul_(15);
  }
}

// Ids that look random and depend only on seed and position.
inline at::Tensor test_ids(std::int64_t batch, std::int64_t tokens, std::int64_t seed) {
  const at::Tensor place = at::arange(batch * tokens, at::kLong) + 1000 * seed;
  return place.mul(40503)
      .add(place.mul(place).mul(977))
      .bitwise_right_shift(5)
      .remainder(kVocabulary)
      .view({batch, tokens});
}

inline Batch make_batch(std::int64_t batch, std::int64_t tokens, std::int64_t seed = 1) {
  Batch result;
  result.fields["inputs"] = test_ids(batch, tokens, seed);
  result.fields["targets"] = test_ids(batch, tokens, seed + 1);
  result.fields["mask"] = at::ones({batch, tokens}, at::kByte);
  result.sample_ids_B = at::arange(batch, at::kLong) + 100;
  return result;
}

inline NoiseKey make_noise(const Batch& batch, std::int64_t step = 3) {
  return {.seed = 5,
          .step = at::full({1}, step, at::kLong),
          .layer = 0,
          .sample_ids_B = batch.sample_ids_B};
}

inline at::Tensor parameter_of(Model& model, const std::string& name) {
  for (const Parameter& parameter : model.parameters().list()) {
    if (parameter.name == name) return parameter.value;
  }
  return {};
}

inline double greatest_difference(const at::Tensor& a, const at::Tensor& b) {
  return (a - b).abs().max().item<double>();
}

}  // namespace birkhoff
