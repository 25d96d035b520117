// A linear layer, a batch norm and an activation: the part that PCT is made of.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "models/point_cloud_transformer/batch_norm.h"
#include "models/transformer/layers.h"

namespace birkhoff::configs {
class Config;
}

namespace birkhoff {

// Layers before a batch norm have no bias: the norm would remove it.
configs::Model without_bias(const configs::Config& config);
// With the epsilon and the momentum of the configuration.
BatchNorm make_batch_norm(const configs::Config& config, std::int64_t channels,
                          const std::string& name, Parameters& parameters);

class NormedLinear {
 public:
  // negative_slope: of the activation for negative values; 0: relu.
  NormedLinear(const configs::Config& config, std::int64_t inputs, std::int64_t outputs,
               double negative_slope, const std::string& name, Parameters& parameters);

  // [..., outputs], in the parameters' dtype, for x [..., inputs]. Collective as BatchNorm.
  at::Tensor operator()(const at::Tensor& x, bool training, NamedSums& sums) const;
  // Forward FLOPs of one row.
  double flops() const { return linear_.flops(); }

 private:
  Linear linear_;
  BatchNorm norm_;
  double negative_slope_;
};

}  // namespace birkhoff
