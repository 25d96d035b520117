// A classifier of point sets (Lee et al. 2019, "Set Transformer", section 3): layers, pooling by
// attention of learned points, the seeds, and an output layer. Permuted points have the same
// outputs.
//
// Legend: B batch, N points of a set, P coordinates, S seeds, C channels, K classes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "models/classifier.h"
#include "models/model.h"
#include "models/set_transformer/set_block.h"

namespace birkhoff {

class SetTransformer final : public Model, public Classifier {
 public:
  // config must be resolved, with task.point_sets. Errors as of SetBlock.
  SetTransformer(const configs::Config& config, const ModelPlacement& place);

  Parameters& parameters() override { return parameters_; }
  // Counts one target per set. The sum "accuracy" is the number of sets whose label is the
  // likeliest class.
  LossSums loss_sums(const Batch& batch, const std::optional<NoiseKey>& noise) override;
  Classifier* classifier() override { return this; }
  at::Device device() const override { return parameters_.device(); }
  // Of field::kPoints.
  at::Tensor log_probabilities(const Batch& batch) override;
  std::int64_t max_tokens() const override { return num_points_; }
  double forward_flops_per_sequence() const override;
  std::vector<Figure> figures() const override;
  // Says so if the pooling gives all points the same weight.
  std::vector<std::string> warnings() const override;

 private:
  // [B, K], in the compute dtype.
  at::Tensor logits(const Batch& batch, const std::optional<NoiseKey>& noise) const;

  Parameters parameters_;
  std::int64_t num_points_, dimensions_;
  float dropout_;
  bool recompute_;
  std::vector<SetLayer> layers_;
  int last_unit_;
  at::Tensor seeds_SC;
  SetBlock pooling_;
  Linear output_;
};

}  // namespace birkhoff
