// A classifier of point sets: the loss of the logits of its network, and probabilities.
//
// Legend: B batch, N points of a set, P coordinates, K classes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "models/classifier.h"
#include "models/model.h"
#include "models/transformer/layers.h"

namespace birkhoff {

class PointClassifier : public Model, public Classifier {
 public:
  // config must be resolved, with task.point_sets.
  PointClassifier(const configs::Config& config, const ModelPlacement& place);

  Parameters& parameters() override { return parameters_; }
  // Counts one target per set, which in training has the weight of its class. The sum "accuracy" is
  // the number of sets whose label is the likeliest class.
  LossSums loss_sums(const Batch& batch, const std::optional<NoiseKey>& noise) override;
  Classifier* classifier() override { return this; }
  at::Device device() const override { return parameters_.device(); }
  // Of field::kPoints.
  at::Tensor log_probabilities(const Batch& batch) override;
  std::int64_t max_tokens() const override { return num_points_; }
  std::vector<Figure> figures() const override;

 protected:
  // [B, K], in the compute dtype, of points [B, N, P] in the parameters' dtype. Without noise:
  // evaluation. Appends the sums of statistics in training.
  virtual at::Tensor logits(const at::Tensor& points_BNP, const std::optional<NoiseKey>& noise,
                            NamedSums& sums) const = 0;
  std::int64_t num_points() const { return num_points_; }  // N
  // Dropout outside of layers, each with a stream of its own; none without noise.
  static at::Tensor dropped(const at::Tensor& x, float dropout,
                            const std::optional<NoiseKey>& noise, RandomStream consumer);

  Parameters parameters_;

 private:
  // The points of a batch. Error(kData) if they have other dimensions than the model reads.
  at::Tensor points_of(const Batch& batch) const;

  std::int64_t num_points_, dimensions_;
  at::Tensor class_weight_K_;  // undefined: all are 1
};

}  // namespace birkhoff
