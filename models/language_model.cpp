#include "models/language_model.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <c10/core/GradMode.h>

#include <algorithm>

#include "cluster/base/error.h"
#include "configs/schema/config.pb.h"
#include "models/parallel/parallel_cross_entropy.h"
#include "models/parallel/parameter_use.h"

namespace birkhoff {

LanguageModel::LanguageModel(const configs::Config& config, std::int64_t vocabulary,
                             const ModelPlacement& place, const std::optional<ImageDims>& image)
    : parameters_(make_parameters(config, place)),
      vocabulary_(vocabulary),
      sequence_length_(config.data().sequence_length()),
      embedding_(config, StackRole::kDecoder, vocabulary, parameters_, image),
      stack_(config, StackRole::kDecoder, parameters_) {
  const configs::Model& model = config.model();
  const std::int64_t channels = model.channels(), width = embedding_width(model);
  if (width != channels) {
    output_down_.emplace(model, WeightRole::kInner, channels, width, "output.down", parameters_);
  }
  output_VE = model.tie_embeddings()
                  ? embedding_.weight_VE()
                  : parameters_.add("output.weight", {vocabulary, width},
                                    weight_init(model, WeightRole::kEmbedding, channels),
                                    /*decay=*/true, {.dim = 0});
}

at::Tensor LanguageModel::outputs(const Batch& batch, const TokenSlices& tokens,
                                  const std::optional<NoiseKey>& noise, NamedSums& sums) const {
  return stack_.forward(embedding_(batch, tokens, noise), token_context(batch, tokens), noise,
                        sums);
}

at::Tensor LanguageModel::output_logits(const at::Tensor& x, const TokenSlices& tokens) const {
  std::vector<int> units{stack_.last_unit()};
  if (output_VE.is_same(embedding_.weight_VE())) units.push_back(embedding_.unit());
  const ParameterUse use(parameters_, std::move(units));
  return use.output(tokens
                        .gather_linear(output_down_ ? (*output_down_)(x) : x,
                                       output_VE.to(parameters_.compute_dtype()), {})
                        .y_BTO);
}

at::Tensor LanguageModel::all_logits(const at::Tensor& logits_BTv) const {
  ProcessGroup* const group = parameters_.place().tensor;
  return (group == nullptr ? logits_BTv : gather_logits(logits_BTv, vocabulary_, *group))
      .to(parameters_.dtype());
}

LossSums LanguageModel::loss_of(const at::Tensor& logits_BTv, const at::Tensor& targets_BT,
                                const at::Tensor& mask_BT) const {
  const ModelPlacement& place = parameters_.place();
  if (place.tensor == nullptr) return cross_entropy_sums(logits_BTv, targets_BT, mask_BT);
  return parallel_cross_entropy_sums(logits_BTv, targets_BT, mask_BT,
                                     partition(vocabulary_, place.tensor_rank, place.tensor_size),
                                     *place.tensor);
}

LossSums LanguageModel::loss_sums(const Batch& batch, const std::optional<NoiseKey>& noise) {
  NamedSums sums;
  const TokenSlices tokens = token_slices(batch, parameters_);
  const at::Tensor x_BTC = outputs(batch, tokens, noise, sums);
  LossSums loss_sums =
      output_loss(x_BTC, tokens, batch.at(field::kTargets), batch.at(field::kMask));
  add_layer_sums(sums, loss_sums, parameters_.place().tensor);
  return loss_sums;
}

LossSums LanguageModel::output_loss(const at::Tensor& x_BTC, const TokenSlices& tokens,
                                    const at::Tensor& targets_BT, const at::Tensor& mask_BT) const {
  // 256 MiB in fp32 on a rank, and as much again for the log-softmax.
  constexpr std::int64_t kMaxLogits = std::int64_t{1} << 26;
  const int ranks = parameters_.place().tensor_size;
  const std::int64_t ids = (vocabulary_ + ranks - 1) / ranks, num_tokens = targets_BT.numel();
  if (c10::GradMode::is_enabled() || num_tokens * ids <= kMaxLogits) {
    return loss_of(output_logits(x_BTC, tokens), targets_BT, mask_BT);
  }
  const at::Tensor x_1NC = tokens.gather(x_BTC).flatten(0, 1).unsqueeze(0);
  const at::Tensor targets_1N = targets_BT.reshape({1, num_tokens}),
                   mask_1N = mask_BT.reshape({1, num_tokens});
  const std::int64_t rows = std::max<std::int64_t>(1, kMaxLogits / ids);
  LossSums total;
  for (std::int64_t begin = 0; begin < num_tokens; begin += rows) {
    const std::int64_t count = std::min(rows, num_tokens - begin);
    const LossSums part =
        loss_of(output_logits(x_1NC.narrow(1, begin, count), {}),
                targets_1N.narrow(1, begin, count), mask_1N.narrow(1, begin, count));
    if (begin == 0) {
      total = part;
      continue;
    }
    total.loss = total.loss + part.loss;
    total.nats = total.nats + part.nats;
    total.count = total.count + part.count;
  }
  return total;
}

at::Tensor LanguageModel::logits(const Batch& batch, const std::optional<NoiseKey>& noise) {
  NamedSums sums;
  const TokenSlices tokens = token_slices(batch, parameters_);
  return all_logits(output_logits(outputs(batch, tokens, noise, sums), tokens));
}

std::unique_ptr<DecodeCache> LanguageModel::decode_cache(std::int64_t batch) {
  return stack_.decode_cache(batch);
}

at::Tensor LanguageModel::decode_step(DecodeCache& cache, const at::Tensor& tokens_B) {
  const c10::AutoGradMode no_gradients(false);
  require(cache.length() < max_tokens(), "decode_step: the cache already holds max_tokens()");
  const at::Tensor tokens_BT = tokens_B.unsqueeze(1);
  const at::Tensor positions_BT = at::full(tokens_BT.sizes(), cache.length(), tokens_BT.options());
  const TokenSlices slices(parameters_.place(), tokens_B.size(0), 1);
  const at::Tensor x =
      stack_.decode_step(cache, embedding_.embed(tokens_BT, positions_BT, slices), slices);
  return all_logits(output_logits(x, slices)).squeeze(1);
}

double LanguageModel::forward_flops_per_sequence() const {
  const double of_token =
      embedding_.flops() +
      2.0 * static_cast<double>(vocabulary_) * static_cast<double>(output_VE.size(1)) +
      (output_down_ ? output_down_->flops() : 0);
  return static_cast<double>(sequence_length_) * of_token + stack_.forward_flops(sequence_length_);
}

}  // namespace birkhoff
