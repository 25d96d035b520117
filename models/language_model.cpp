#include "models/language_model.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/linear.h>
#include <c10/core/GradMode.h>

#include "configs/config.pb.h"

namespace birkhoff {

LanguageModel::LanguageModel(const configs::Config& config, std::int64_t vocabulary,
                             const ParallelGroups& parallel)
    : parameters_(make_parameters(config, parallel)),
      transformer_(config, StackRole::kDecoder, vocabulary, parameters_, parallel) {
  const configs::Model& model = config.model();
  const std::int64_t channels = model.channels(), width = embedding_width(model);
  if (width != channels) {
    output_down_.emplace(model, WeightRole::kInner, channels, width, "output.down", parameters_);
  }
  output_VE = model.tie_embeddings()
                  ? transformer_.embedding_VE()
                  : parameters_.add("output.weight", {vocabulary, width},
                                    weight_init(model, WeightRole::kEmbedding, channels),
                                    /*decay=*/true);
}

at::Tensor LanguageModel::output_logits(const at::Tensor& x) const {
  return at::linear(output_down_ ? (*output_down_)(x) : x,
                    output_VE.to(parameters_.compute_dtype()));
}

LossSums LanguageModel::loss_sums(const Batch& batch, const std::optional<NoiseKey>& noise) {
  NamedSums sums;
  const at::Tensor logits_BTV = output_logits(transformer_.forward(batch, noise, sums));
  LossSums loss_sums =
      cross_entropy_sums(logits_BTV, batch.at(field::kTargets), batch.at(field::kMask));
  add_layer_sums(sums, loss_sums);
  return loss_sums;
}

at::Tensor LanguageModel::logits(const Batch& batch, const std::optional<NoiseKey>& noise) {
  NamedSums sums;
  return output_logits(transformer_.forward(batch, noise, sums)).to(parameters_.dtype());
}

std::unique_ptr<DecodeCache> LanguageModel::decode_cache(std::int64_t batch) {
  return transformer_.decode_cache(batch);
}

at::Tensor LanguageModel::decode_step(DecodeCache& cache, const at::Tensor& tokens_B) {
  const c10::AutoGradMode no_gradients(false);
  return output_logits(transformer_.decode_step(cache, tokens_B))
      .squeeze(1)
      .to(parameters_.dtype());
}

double LanguageModel::forward_flops_per_sequence() const {
  const double of_token =
      2.0 * static_cast<double>(output_VE.numel()) + (output_down_ ? output_down_->flops() : 0);
  return static_cast<double>(transformer_.sequence_length()) * of_token +
         transformer_.forward_flops();
}

}  // namespace birkhoff
