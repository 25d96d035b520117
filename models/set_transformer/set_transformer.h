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

#include "models/point_classifier.h"
#include "models/set_transformer/set_block.h"

namespace birkhoff {

class SetTransformer final : public PointClassifier {
 public:
  // config must be resolved, with task.point_sets. Errors as of SetBlock.
  SetTransformer(const configs::Config& config, const ModelPlacement& place);

  double forward_flops_per_sequence() const override;
  // Says so if the pooling gives all points the same weight.
  std::vector<std::string> warnings() const override;

 protected:
  at::Tensor logits(const at::Tensor& points_BNP, const std::optional<NoiseKey>& noise,
                    NamedSums& sums) const override;

 private:
  float dropout_;
  bool recompute_;
  std::vector<SetLayer> layers_;
  int last_unit_;
  at::Tensor seeds_SC;
  SetBlock pooling_;
  Linear output_;
};

}  // namespace birkhoff
