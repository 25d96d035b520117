#include "models/point_cloud_transformer/normed_linear.h"

#include <ATen/ops/leaky_relu.h>
#include <ATen/ops/relu.h>

#include "configs/schema/config.pb.h"

namespace birkhoff {

configs::Model without_bias(const configs::Config& config) {
  configs::Model model = config.model();
  model.set_bias(false);
  return model;
}

BatchNorm make_batch_norm(const configs::Config& config, std::int64_t channels,
                          const std::string& name, Parameters& parameters) {
  return {channels, config.model().norm_epsilon(),
          config.task().point_sets().point_cloud_transformer().momentum(), name, parameters};
}

NormedLinear::NormedLinear(const configs::Config& config, std::int64_t inputs, std::int64_t outputs,
                           double negative_slope, const std::string& name, Parameters& parameters)
    : linear_(without_bias(config), WeightRole::kInner, inputs, outputs, name, parameters),
      norm_(make_batch_norm(config, outputs, name + "_norm", parameters)),
      negative_slope_(negative_slope) {}

at::Tensor NormedLinear::operator()(const at::Tensor& x, bool training, NamedSums& sums) const {
  const at::Tensor normed = norm_(linear_(x), training, sums);
  return negative_slope_ == 0 ? at::relu(normed) : at::leaky_relu(normed, negative_slope_);
}

}  // namespace birkhoff
