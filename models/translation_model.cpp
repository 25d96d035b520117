#include "models/translation_model.h"

#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>

#include <utility>

#include "cluster/base/error.h"
#include "configs/schema/config.pb.h"

namespace birkhoff {
namespace {

constexpr char kTokenAccuracy[] = "accuracy", kSequenceAccuracy[] = "accuracy_per_sequence",
               kSequences[] = "sequences";

// The ids of the decoder's inputs as a batch of its embedding and stack. Padding behind the targets
// changes no output before it, but it must not count in the layers' sums.
Batch targets_of(const Batch& batch) {
  Batch targets;
  targets.fields.emplace(field::kInputs, batch.at(field::kPrevious));
  targets.fields.emplace(field::kLengths, batch.at(field::kMask).sum(1).clamp_min(1));
  targets.sample_ids_B = batch.sample_ids_B;
  return targets;
}

std::int64_t vocabulary_if_shared(const configs::Config& config, std::int64_t source_vocabulary,
                                  std::int64_t target_vocabulary) {
  if (config.model().encoder().share_embedding() && source_vocabulary != target_vocabulary) {
    fail(ExitCode::kConfig,
         "model.encoder.share_embedding: needs one vocabulary, but sources have {} ids and targets "
         "{}; prepare both with one tokenizer, or set it to false",
         source_vocabulary, target_vocabulary);
  }
  return target_vocabulary;
}

}  // namespace

TranslationModel::TranslationModel(const configs::Config& config, std::int64_t source_vocabulary,
                                   std::int64_t target_vocabulary, double label_smoothing,
                                   const ModelPlacement& place)
    : parameters_(make_parameters(config, place)),
      label_smoothing_(label_smoothing),
      source_length_(longest_sequence(config, StackRole::kSourceEncoder)),
      target_length_(longest_sequence(config, StackRole::kTargetDecoder)),
      source_embedding_(config, StackRole::kSourceEncoder, source_vocabulary, parameters_),
      encoder_(config, StackRole::kSourceEncoder, parameters_),
      target_embedding_(config, StackRole::kTargetDecoder,
                        vocabulary_if_shared(config, source_vocabulary, target_vocabulary),
                        parameters_, /*image=*/std::nullopt,
                        config.model().encoder().share_embedding() ? &source_embedding_ : nullptr),
      decoder_(config, StackRole::kTargetDecoder, parameters_),
      output_(config.model(), target_vocabulary, target_embedding_, decoder_, parameters_) {}

Memory TranslationModel::encode(const Batch& sources, const std::optional<NoiseKey>& noise,
                                NamedSums& sums) const {
  const TokenSlices tokens = token_slices(sources, parameters_);
  return encoder_.encode(source_embedding_(sources, tokens, noise), token_context(sources, tokens),
                         noise, sums);
}

TranslationModel::Outputs TranslationModel::outputs(const Batch& batch,
                                                    const std::optional<NoiseKey>& noise) const {
  Outputs result;
  Memory memory = encode(batch, noise, result.encoder_sums);
  const Batch targets = targets_of(batch);
  result.tokens = token_slices(targets, parameters_);
  SequenceContext context = token_context(targets, result.tokens);
  context.memory = std::move(memory);
  result.x_BTC = decoder_.forward(target_embedding_(targets, result.tokens, noise), context, noise,
                                  result.decoder_sums);
  return result;
}

LossSums TranslationModel::loss_sums(const Batch& batch, const std::optional<NoiseKey>& noise) {
  const Outputs outputs = this->outputs(batch, noise);
  const at::Tensor &mask_BT = batch.at(field::kMask), &lengths_B = batch.at(field::kLengths);
  auto [sums, correct_BT] =
      output_.loss(outputs.x_BTC, outputs.tokens, batch.at(field::kTargets), mask_BT,
                   noise ? label_smoothing_ : 0, /*with_correct=*/true);
  const at::Tensor counts_BT = mask_BT.ne(0), targets_B = counts_BT.sum(1);
  sums.tokens = lengths_B.sum(at::kDouble) + sums.count;
  sums.named.emplace_back(kTokenAccuracy, correct_BT.logical_and(counts_BT).sum(at::kDouble));
  const at::Tensor has_targets_B = targets_B.gt(0);
  sums.named.emplace_back(kSequenceAccuracy, correct_BT.logical_or(counts_BT.logical_not())
                                                 .all(1)
                                                 .logical_and(has_targets_B)
                                                 .sum(at::kDouble));
  sums.named.emplace_back(kSequences, has_targets_B.sum(at::kDouble));
  ProcessGroup* const group = parameters_.place().tensor;
  add_layer_sums(outputs.encoder_sums, sums, group,
                 targets_B.to(parameters_.dtype()) / lengths_B.to(parameters_.dtype()));
  add_layer_sums(outputs.decoder_sums, sums, group);
  return sums;
}

at::Tensor TranslationModel::logits(const Batch& batch, const std::optional<NoiseKey>& noise) {
  const Outputs outputs = this->outputs(batch, noise);
  return output_.logits(outputs.x_BTC, outputs.tokens);
}

std::unique_ptr<DecodeCache> TranslationModel::decode_cache(const Batch& sources) {
  const c10::AutoGradMode no_gradients(false);
  NamedSums sums;
  return decoder_.decode_cache(sources.at(field::kInputs).size(0),
                               encode(sources, std::nullopt, sums));
}

at::Tensor TranslationModel::decode_step(DecodeCache& cache, const at::Tensor& tokens_B) {
  require(cache.length() < max_tokens(), "decode_step: the cache already holds max_tokens()");
  return output_.decode_step(target_embedding_, decoder_, cache, tokens_B);
}

double TranslationModel::forward_flops_per_sequence() const {
  const auto sources = static_cast<double>(source_length_),
             targets = static_cast<double>(target_length_);
  return sources * source_embedding_.flops() + encoder_.forward_flops(source_length_) +
         targets * (target_embedding_.flops() + output_.flops()) +
         decoder_.forward_flops(target_length_, source_length_);
}

std::vector<Figure> TranslationModel::figures() const {
  std::vector<Figure> result{{.sum = kTokenAccuracy, .per = ""},
                             {.sum = kSequenceAccuracy, .per = kSequences}};
  for (const Stack* stack : {&encoder_, &decoder_}) {
    for (Figure& figure : stack->figures()) result.push_back(std::move(figure));
  }
  return result;
}

std::vector<std::string> TranslationModel::warnings() const {
  std::vector<std::string> result = encoder_.warnings();
  for (std::string& warning : decoder_.warnings()) result.push_back(std::move(warning));
  return result;
}

}  // namespace birkhoff
