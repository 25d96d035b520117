#include "models/sequence_classifier.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <c10/core/GradMode.h>

#include "cluster/base/error.h"
#include "configs/schema/config.pb.h"
#include "models/embeddings/token_embedding.h"
#include "models/losses/classification_sums.h"
#include "models/parallel/parameter_use.h"

namespace birkhoff {
namespace {

// Samples [B, 2, T] of two sequences as 2B sequences, each with an id, and so noise, of its own.
Batch one_by_one(const Batch& samples) {
  const at::Tensor &inputs_B2T = samples.at(field::kInputs), ids_B = samples.sample_ids_B;
  if (inputs_B2T.dim() != 3) {
    fail(ExitCode::kData, "a sample is one text, but the model reads pairs of texts");
  }
  Batch batch;
  batch.fields.emplace(field::kInputs, inputs_B2T.flatten(0, 1));
  batch.fields.emplace(field::kLengths, samples.at(field::kLengths).flatten());
  batch.sample_ids_B = at::stack({2 * ids_B, 2 * ids_B + 1}, 1).flatten();
  batch.global_size = 2 * samples.global_size;
  return batch;
}

// [a, b, |a - b|, a b] of vectors a, b in turn: [B, 4 C] of [2 B, C].
at::Tensor combined(const at::Tensor& x_2BC) {
  const at::Tensor x_B2C = x_2BC.unflatten(0, {-1, 2});
  const at::Tensor a_BC = x_B2C.select(1, 0), b_BC = x_B2C.select(1, 1);
  return at::cat({a_BC, b_BC, (a_BC - b_BC).abs(), a_BC * b_BC}, 1);
}

}  // namespace

SequenceClassifier::SequenceClassifier(const configs::Config& config,
                                       const MakeEmbedding& make_embedding, Pooling pooling,
                                       std::int64_t classes, const ModelPlacement& place,
                                       std::int64_t sequences)
    : parameters_(make_parameters(config, place)),
      sequence_length_(config.data().sequence_length()),
      sequences_(sequences),
      embedding_(make_embedding(parameters_)),
      stack_(config, StackRole::kEncoder, parameters_),
      pooling_(pooling),
      output_(config.model(), WeightRole::kEmbedding,
              (sequences == 1 ? 1 : 4) * config.model().channels(), classes, "output", parameters_),
      class_weight_K_(class_weights(
          config.task(), at::TensorOptions(parameters_.dtype()).device(parameters_.device()))) {}

at::Tensor SequenceClassifier::logits(const Batch& samples,
                                      const std::optional<NoiseKey>& noise_of_samples,
                                      NamedSums& sums) const {
  const Batch batch = sequences_ == 1 ? samples : one_by_one(samples);
  std::optional<NoiseKey> noise = noise_of_samples;
  if (noise && sequences_ > 1) {
    noise->sample_ids_B = batch.sample_ids_B;
    noise->global_batch *= sequences_;
  }
  const TokenSlices tokens = embedding_->slices(batch);
  const at::Tensor x_BTC = tokens.gather(stack_.forward((*embedding_)(batch, tokens, noise),
                                                        token_context(batch, tokens), noise, sums));
  const ParameterUse use(parameters_, {stack_.last_unit()});
  at::Tensor pooled = pool(pooling_, x_BTC, embedding_->lengths(batch), parameters_.dtype());
  if (sequences_ > 1) pooled = combined(pooled);
  const at::Tensor logits_BK = use.output(output_(pooled));
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
  const at::Tensor weight_B = training_weights(class_weight_K_, batch, noise);
  LossSums loss_sums = classification_sums(logits_BK, batch.at(field::kLabels), weight_B);
  const at::Tensor lengths = embedding_->lengths(batch);
  loss_sums.tokens = lengths.sum(at::kDouble);
  // Layers have sums of each sequence.
  const auto of_sequences = [this](const at::Tensor& of_sample_B) {
    return sequences_ == 1 || !of_sample_B.defined() ? of_sample_B
                                                     : of_sample_B.repeat_interleave(sequences_);
  };
  const at::Tensor tokens_B = sequences_ == 1 ? lengths : lengths.sum(1);
  add_layer_sums(sums, loss_sums, parameters_.place().tensor,
                 of_sequences(tokens_B.to(parameters_.dtype()).reciprocal()),
                 of_sequences(weight_B));
  return loss_sums;
}

at::Tensor SequenceClassifier::log_probabilities(const Batch& batch) {
  const c10::AutoGradMode no_gradients(false);
  NamedSums sums;
  return at::log_softmax(logits(batch, std::nullopt, sums), /*dim=*/-1, parameters_.dtype());
}

double SequenceClassifier::forward_flops_per_sequence() const {
  return static_cast<double>(sequences_) *
             (static_cast<double>(sequence_length_) * embedding_->flops() +
              stack_.forward_flops(sequence_length_)) +
         output_.flops();
}

std::vector<Figure> SequenceClassifier::figures() const {
  std::vector<Figure> result = stack_.figures();
  result.insert(result.begin(), accuracy_figure());
  return result;
}

}  // namespace birkhoff
