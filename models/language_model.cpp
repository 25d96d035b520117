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
  const std::int64_t channels = model.channels();
  output_VC = model.tie_embeddings()
                  ? transformer_.embedding_VC()
                  : parameters_.add("output.weight", {vocabulary, channels},
                                    weight_init(model, WeightRole::kEmbedding, channels),
                                    /*decay=*/true);
}

at::Tensor LanguageModel::output_logits(const at::Tensor& x) const {
  return at::linear(x, output_VC.to(parameters_.compute_dtype()));
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
  return 2.0 * static_cast<double>(transformer_.sequence_length()) *
             static_cast<double>(output_VC.numel()) +
         transformer_.forward_flops();
}

}  // namespace birkhoff
