#include "models/sequence_classifier.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/where.h>
#include <c10/core/GradMode.h>

#include "configs/schema/config.pb.h"
#include "models/embeddings/token_embedding.h"
#include "models/losses/classification_sums.h"
#include "models/parallel/parameter_use.h"

namespace birkhoff {

SequenceClassifier::SequenceClassifier(const configs::Config& config,
                                       const MakeEmbedding& make_embedding, Pooling pooling,
                                       std::int64_t classes, const ModelPlacement& place)
    : parameters_(make_parameters(config, place)),
      sequence_length_(config.data().sequence_length()),
      embedding_(make_embedding(parameters_)),
      stack_(config, StackRole::kEncoder, parameters_),
      pooling_(pooling),
      output_(config.model(), WeightRole::kEmbedding, config.model().channels(), classes, "output",
              parameters_) {}

at::Tensor SequenceClassifier::logits(const Batch& batch, const std::optional<NoiseKey>& noise,
                                      NamedSums& sums) const {
  const TokenSlices tokens = embedding_->slices(batch);
  const at::Tensor x_BTC = tokens.gather(stack_.forward((*embedding_)(batch, tokens, noise),
                                                        token_context(batch, tokens), noise, sums));
  const ParameterUse use(parameters_, {stack_.last_unit()});
  const at::Tensor logits_BK =
      use.output(output_(pool(pooling_, x_BTC, embedding_->lengths(batch), parameters_.dtype())));
  if (!tokens.divided()) return logits_BK;
  // All ranks compute all logits, but each gives the gradient of its own samples only.
  const ModelPlacement& place = parameters_.place();
  const Interval mine = partition(logits_BK.size(0), place.tensor_rank, place.tensor_size);
  const at::Tensor sample_B1 =
      at::arange(logits_BK.size(0), logits_BK.options().dtype(at::kLong)).unsqueeze(1);
  return at::where(sample_B1.ge(mine.begin).logical_and(sample_B1.lt(mine.end)), logits_BK,
                   logits_BK.detach());
}

LossSums SequenceClassifier::loss_sums(const Batch& batch, const std::optional<NoiseKey>& noise) {
  NamedSums sums;
  const at::Tensor logits_BK = logits(batch, noise, sums);
  LossSums loss_sums = classification_sums(logits_BK, batch.at(field::kLabels));
  const at::Tensor lengths_B = embedding_->lengths(batch);
  loss_sums.tokens = lengths_B.sum(at::kDouble);
  add_layer_sums(sums, loss_sums, parameters_.place().tensor,
                 lengths_B.to(parameters_.dtype()).reciprocal());
  return loss_sums;
}

at::Tensor SequenceClassifier::log_probabilities(const Batch& batch) {
  const c10::AutoGradMode no_gradients(false);
  NamedSums sums;
  return at::log_softmax(logits(batch, std::nullopt, sums), /*dim=*/-1, parameters_.dtype());
}

double SequenceClassifier::forward_flops_per_sequence() const {
  return static_cast<double>(sequence_length_) * embedding_->flops() +
         stack_.forward_flops(sequence_length_) + output_.flops();
}

std::vector<Figure> SequenceClassifier::figures() const {
  std::vector<Figure> result = stack_.figures();
  result.insert(result.begin(), accuracy_figure());
  return result;
}

}  // namespace birkhoff
