#include "models/language_model.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <c10/core/GradMode.h>

#include <algorithm>

#include "cluster/base/error.h"
#include "configs/schema/config.pb.h"

namespace birkhoff {

LanguageModel::LanguageModel(const configs::Config& config, std::int64_t vocabulary,
                             at::Device device)
    : parameters_(make_parameters(config, device)),
      sequence_length_(config.data().sequence_length()),
      embedding_(config, StackRole::kDecoder, vocabulary, parameters_),
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
                                    /*decay=*/true);
}

at::Tensor LanguageModel::outputs(const Batch& batch, const std::optional<NoiseKey>& noise,
                                  NamedSums& sums) const {
  return stack_.forward(embedding_(batch, noise), token_context(batch), noise, sums);
}

at::Tensor LanguageModel::output_logits(const at::Tensor& x) const {
  return at::linear(output_down_ ? (*output_down_)(x) : x,
                    output_VE.to(parameters_.compute_dtype()));
}

LossSums LanguageModel::loss_sums(const Batch& batch, const std::optional<NoiseKey>& noise) {
  NamedSums sums;
  const at::Tensor x_BTC = outputs(batch, noise, sums);
  LossSums loss_sums = output_loss(x_BTC, batch.at(field::kTargets), batch.at(field::kMask));
  add_layer_sums(sums, loss_sums);
  return loss_sums;
}

LossSums LanguageModel::output_loss(const at::Tensor& x_BTC, const at::Tensor& targets_BT,
                                    const at::Tensor& mask_BT) const {
  // 256 MiB in fp32, and as much again for the log-softmax.
  constexpr std::int64_t kMaxLogits = std::int64_t{1} << 26;
  const std::int64_t vocabulary = output_VE.size(0), tokens = targets_BT.numel();
  if (c10::GradMode::is_enabled() || tokens * vocabulary <= kMaxLogits) {
    return cross_entropy_sums(output_logits(x_BTC), targets_BT, mask_BT);
  }
  const at::Tensor x_1NC = x_BTC.flatten(0, 1).unsqueeze(0);
  const at::Tensor targets_1N = targets_BT.reshape({1, tokens}),
                   mask_1N = mask_BT.reshape({1, tokens});
  const std::int64_t rows = std::max<std::int64_t>(1, kMaxLogits / vocabulary);
  LossSums total;
  for (std::int64_t begin = 0; begin < tokens; begin += rows) {
    const std::int64_t count = std::min(rows, tokens - begin);
    const LossSums part =
        cross_entropy_sums(output_logits(x_1NC.narrow(1, begin, count)),
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
  return output_logits(outputs(batch, noise, sums)).to(parameters_.dtype());
}

std::unique_ptr<DecodeCache> LanguageModel::decode_cache(std::int64_t batch) {
  return stack_.decode_cache(batch);
}

at::Tensor LanguageModel::decode_step(DecodeCache& cache, const at::Tensor& tokens_B) {
  const c10::AutoGradMode no_gradients(false);
  require(cache.length() < max_tokens(), "decode_step: the cache already holds max_tokens()");
  const at::Tensor tokens_BT = tokens_B.unsqueeze(1);
  const at::Tensor positions_BT = at::full(tokens_BT.sizes(), cache.length(), tokens_BT.options());
  return output_logits(stack_.decode_step(cache, embedding_.embed(tokens_BT, positions_BT)))
      .squeeze(1)
      .to(parameters_.dtype());
}

double LanguageModel::forward_flops_per_sequence() const {
  const double of_token = embedding_.flops() + 2.0 * static_cast<double>(output_VE.numel()) +
                          (output_down_ ? output_down_->flops() : 0);
  return static_cast<double>(sequence_length_) * of_token + stack_.forward_flops(sequence_length_);
}

}  // namespace birkhoff
