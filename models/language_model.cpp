#include "models/language_model.h"

#include "cluster/base/error.h"
#include "configs/loader/check.h"
#include "configs/schema/config.pb.h"

namespace birkhoff {
namespace {

std::vector<std::int64_t> past_shape_of(const configs::Model& model) {
  if (model.memory().length() == 0) return {};
  return {model.layers(), model.memory().length(), model.channels()};
}

}  // namespace

LanguageModel::LanguageModel(const configs::Config& config, std::int64_t vocabulary,
                             const ModelPlacement& place, const std::optional<ImageDims>& image)
    : parameters_(make_parameters(config, place)),
      sequence_length_(config.data().sequence_length()),
      longest_sequence_(longest_sequence(config, StackRole::kDecoder)),
      past_shape_(past_shape_of(config.model())),
      evaluation_memory_(birkhoff::evaluation_memory(config.model())),
      embedding_(config, StackRole::kDecoder, vocabulary, parameters_, image),
      stack_(config, StackRole::kDecoder, parameters_),
      output_(config.model(), vocabulary, embedding_, stack_, parameters_) {}

at::Tensor LanguageModel::outputs(const Batch& batch, const TokenSlices& tokens,
                                  const std::optional<NoiseKey>& noise, NamedSums& sums,
                                  Past* past) const {
  return stack_.forward(embedding_(batch, tokens, noise), token_context(batch, tokens), noise, sums,
                        past);
}

LossSums LanguageModel::loss_sums(const Batch& batch, const std::optional<NoiseKey>& noise) {
  NamedSums sums;
  const TokenSlices tokens = token_slices(batch, parameters_);
  Past past;
  if (batch.has(field::kPast)) past.inputs_BNMC = batch.at(field::kPast);
  if (!past_shape_.empty()) past.max_tokens = noise ? past_shape_[1] : evaluation_memory_;
  const at::Tensor x_BTC =
      outputs(batch, tokens, noise, sums, past_shape_.empty() ? nullptr : &past);
  LossSums loss_sums =
      output_.loss(x_BTC, tokens, batch.at(field::kTargets), batch.at(field::kMask)).sums;
  add_layer_sums(sums, loss_sums, parameters_.place().tensor);
  loss_sums.past_BNMC = past.next_BNMC;
  return loss_sums;
}

at::Tensor LanguageModel::logits(const Batch& batch, const std::optional<NoiseKey>& noise) {
  NamedSums sums;
  const TokenSlices tokens = token_slices(batch, parameters_);
  return output_.logits(outputs(batch, tokens, noise, sums), tokens);
}

std::unique_ptr<DecodeCache> LanguageModel::decode_cache(std::int64_t batch) {
  return stack_.decode_cache(batch);
}

at::Tensor LanguageModel::decode_step(DecodeCache& cache, const at::Tensor& tokens_B) {
  require(cache.length() < max_tokens(), "decode_step: the cache already holds max_tokens()");
  return output_.decode_step(embedding_, stack_, cache, tokens_B);
}

double LanguageModel::forward_flops_per_sequence() const {
  return static_cast<double>(sequence_length_) * (embedding_.flops() + output_.flops()) +
         stack_.forward_flops(sequence_length_, /*memory_tokens=*/0,
                              past_shape_.empty() ? 0 : past_shape_[1]);
}

}  // namespace birkhoff
