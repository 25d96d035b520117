#include "models/point_classifier.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/log_softmax.h>
#include <c10/core/GradMode.h>

#include "cluster/base/error.h"
#include "configs/schema/config.pb.h"
#include "models/losses/classification_sums.h"
#include "models/transformer/stack.h"

namespace birkhoff {

PointClassifier::PointClassifier(const configs::Config& config, const ModelPlacement& place)
    : parameters_(make_parameters(config, place)),
      num_points_(config.data().sequence_length()),
      dimensions_(config.task().point_sets().dimensions()),
      class_weight_K_(class_weights(
          config.task(), at::TensorOptions(parameters_.dtype()).device(parameters_.device()))) {}

at::Tensor PointClassifier::points_of(const Batch& batch) const {
  const at::Tensor& points_BNP = batch.at(field::kPoints);
  if (points_BNP.size(2) != dimensions_) {
    fail(ExitCode::kData, "points have {} coordinates, but the model reads {}", points_BNP.size(2),
         dimensions_);
  }
  return points_BNP.to(parameters_.dtype());
}

LossSums PointClassifier::loss_sums(const Batch& batch, const std::optional<NoiseKey>& noise) {
  NamedSums statistics;
  const at::Tensor logits_BK = logits(points_of(batch), noise, statistics);
  LossSums sums = classification_sums(logits_BK, batch.at(field::kLabels),
                                      training_weights(class_weight_K_, batch, noise));
  sums.tokens = sums.count * static_cast<double>(batch.at(field::kPoints).size(1));
  for (auto& sum : statistics) sums.named.push_back(std::move(sum));
  return sums;
}

at::Tensor PointClassifier::log_probabilities(const Batch& batch) {
  const c10::AutoGradMode no_gradients(false);
  NamedSums none;
  return at::log_softmax(logits(points_of(batch), std::nullopt, none), /*dim=*/-1,
                         parameters_.dtype());
}

at::Tensor PointClassifier::dropped(const at::Tensor& x, float dropout,
                                    const std::optional<NoiseKey>& noise, RandomStream consumer) {
  if (!noise) return x;
  return philox_dropout(
      x, dropout,
      noise->at_layer(noise_layer(noise_number(NoiseLayers::kSourceEncoder, 0), consumer)),
      NoisePurpose::kResidualDropout);
}

std::vector<Figure> PointClassifier::figures() const { return {accuracy_figure()}; }

}  // namespace birkhoff
