// PCT (Guo et al. 2021, "PCT: Point Cloud Transformer"), in the form of the PyTorch code that
// reproduces the paper's results (github.com/Strawberry-Eat-Mango/PCT_Pytorch, model.py):
//
//   two layers on each point: P -> C / 4 -> C / 4
//   two stages, each of which keeps half of the points and gathers neighbors: -> C / 2 -> C
//   two layers on each point: C -> C -> C, then model.layers of offset attention
//   a layer on their outputs and those of the stages, side by side: -> 4 C, and the maximum over
//   points; two hidden layers, 4 C -> 2 C -> C, with dropout, and the output layer.
// All layers but the last one have batch norms and relu, from the maximum on leaky relu (0.2).
//
// Permuted points have the same outputs up to rounding if the first point stays the first and no
// two distances are equal: farthest-point sampling starts at the first point.
//
// Legend: B batch, N points, P coordinates, S kept points, K neighbors, I inputs, C channels, O
// outputs.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "models/point_classifier.h"
#include "models/point_cloud_transformer/offset_attention.h"

namespace birkhoff {

// Points and what is known about each.
struct PointFeatures {
  at::Tensor points_BNP, x_BNC;
};

// Keeps half of the points. The features of a kept point c and its neighbors n become
//   max_n h([x_n - x_c, x_c]),  where h are two layers with batch norms.
class NeighborStage {
 public:
  NeighborStage(const configs::Config& config, std::int64_t inputs, std::int64_t outputs,
                const std::string& name, Parameters& parameters);

  // Collective as BatchNorm.
  PointFeatures operator()(const PointFeatures& in, bool training, NamedSums& sums) const;
  // Of a set of num_points points before the stage.
  double forward_flops(std::int64_t num_points) const;

 private:
  std::int64_t neighbors_, inputs_;
  at::ScalarType compute_dtype_;
  at::Tensor weight_OI;  // of [x_n - x_c, x_c]
  BatchNorm norm_;
  NormedLinear second_;
};

class PointCloudTransformer final : public PointClassifier {
 public:
  // config must be resolved, with task.point_sets.point_cloud_transformer.
  PointCloudTransformer(const configs::Config& config, const ModelPlacement& place);

  double forward_flops_per_sequence() const override;
  std::vector<std::string> warnings() const override { return {}; }

 protected:
  // In training collective over the data-parallel ranks, as is the backward pass.
  at::Tensor logits(const at::Tensor& points_BNP, const std::optional<NoiseKey>& noise,
                    NamedSums& sums) const override;

 private:
  float dropout_;
  int first_unit_;
  NormedLinear embed_1_, embed_2_;
  NeighborStage stage_1_, stage_2_;
  NormedLinear mix_1_, mix_2_;
  std::vector<OffsetAttention> layers_;
  int last_unit_;
  NormedLinear fuse_, hidden_1_, hidden_2_;
  Linear output_;
};

}  // namespace birkhoff
