#include "models/text_classifier.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/where.h>
#include <c10/core/GradMode.h>

#include <limits>

#include "cluster/base/error.h"
#include "models/parallel/parameter_use.h"

namespace birkhoff {
namespace {

constexpr char kAccuracy[] = "accuracy";

}  // namespace

TextClassifier::TextClassifier(const configs::Config& config, std::int64_t vocabulary,
                               const ModelPlacement& place)
    : parameters_(make_parameters(config, place)),
      sequence_length_(config.data().sequence_length()),
      embedding_(config, StackRole::kEncoder, vocabulary, parameters_),
      stack_(config, StackRole::kEncoder, parameters_),
      pooling_(config.task().classification().pooling()),
      output_(config.model(), WeightRole::kEmbedding, config.model().channels(),
              config.task().classification().classes(), "output", parameters_) {}

at::Tensor TextClassifier::pool(const at::Tensor& x_BTC, const at::Tensor& lengths_B) const {
  const auto without_padding = [&](const at::Tensor& x, double value) {
    const at::Tensor padding_BT =
        at::arange(x.size(1), lengths_B.options()).ge(lengths_B.unsqueeze(1));
    return x.masked_fill(padding_BT.unsqueeze(-1), value);
  };
  switch (pooling_) {
    case configs::Classification::mean: {
      const at::Tensor sum_BC = without_padding(x_BTC.to(parameters_.dtype()), 0).sum(1);
      return (sum_BC / lengths_B.unsqueeze(1)).to(x_BTC.scalar_type());
    }
    case configs::Classification::first:
      return x_BTC.select(1, 0);
    case configs::Classification::max:
      return without_padding(x_BTC, -std::numeric_limits<double>::infinity()).amax(1);
  }
  require(false, "task.classification.pooling has a value outside its enum");
  return {};
}

at::Tensor TextClassifier::logits(const Batch& batch, const std::optional<NoiseKey>& noise,
                                  NamedSums& sums) const {
  const TokenSlices tokens = token_slices(batch, parameters_);
  const at::Tensor x_BTC = tokens.gather(
      stack_.forward(embedding_(batch, tokens, noise), token_context(batch, tokens), noise, sums));
  const ParameterUse use(parameters_, {stack_.last_unit()});
  const at::Tensor logits_BK = use.output(output_(pool(x_BTC, batch.at(field::kLengths))));
  if (!tokens.divided()) return logits_BK;
  // All ranks compute all logits, but each gives the gradient of its own samples only.
  const ModelPlacement& place = parameters_.place();
  const Interval mine = partition(logits_BK.size(0), place.tensor_rank, place.tensor_size);
  const at::Tensor sample_B1 =
      at::arange(logits_BK.size(0), logits_BK.options().dtype(at::kLong)).unsqueeze(1);
  return at::where(sample_B1.ge(mine.begin).logical_and(sample_B1.lt(mine.end)), logits_BK,
                   logits_BK.detach());
}

LossSums TextClassifier::loss_sums(const Batch& batch, const std::optional<NoiseKey>& noise) {
  NamedSums sums;
  const at::Tensor logits_BK = logits(batch, noise, sums);
  const at::Tensor& labels_B = batch.at(field::kLabels);
  // Before the loss, which may overwrite the logits.
  const at::Tensor correct = logits_BK.detach().argmax(-1).eq(labels_B).sum(at::kDouble);
  LossSums loss_sums =
      cross_entropy_sums(logits_BK.unsqueeze(1), labels_B.unsqueeze(1),
                         at::ones_like(labels_B, at::TensorOptions(at::kByte)).unsqueeze(1));
  const at::Tensor& lengths_B = batch.at(field::kLengths);
  loss_sums.tokens = lengths_B.sum(at::kDouble);
  loss_sums.named.emplace_back(kAccuracy, correct);
  add_layer_sums(sums, loss_sums, parameters_.place().tensor,
                 lengths_B.to(parameters_.dtype()).reciprocal());
  return loss_sums;
}

at::Tensor TextClassifier::log_probabilities(const Batch& batch) {
  const c10::AutoGradMode no_gradients(false);
  NamedSums sums;
  return at::log_softmax(logits(batch, std::nullopt, sums), /*dim=*/-1, parameters_.dtype());
}

double TextClassifier::forward_flops_per_sequence() const {
  return static_cast<double>(sequence_length_) * embedding_.flops() +
         stack_.forward_flops(sequence_length_) + output_.flops();
}

std::vector<Figure> TextClassifier::figures() const {
  std::vector<Figure> result = stack_.figures();
  result.insert(result.begin(), Figure{.sum = kAccuracy, .per = ""});
  return result;
}

}  // namespace birkhoff
