#include "models/set_transformer/set_block.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/relu.h>

#include <algorithm>
#include <cmath>

#include "cluster/base/error.h"
#include "configs/schema/config.pb.h"
#include "models/parallel/parameter_use.h"

namespace birkhoff {
namespace {

std::string set_layer_name(std::int64_t number) { return "blocks." + std::to_string(number); }

std::optional<LayerNorm> make_norm(const configs::Config& config, const std::string& name,
                                   Parameters& parameters) {
  if (!config.task().point_sets().set_transformer().layer_norm()) return std::nullopt;
  return LayerNorm(config.model(), name, parameters);
}

at::Tensor make_inducing_points(const configs::Config& config, std::int64_t number,
                                Parameters& parameters) {
  const std::int64_t count = config.task().point_sets().set_transformer().inducing_points();
  if (count == 0) return {};
  return add_learned_points(count, config.model().channels(),
                            set_layer_name(number) + ".inducing.points", parameters);
}

// block(I, X) of a layer with inducing points, or the layer's last block.
SetBlock make_block(const configs::Config& config, std::int64_t number, std::int64_t width,
                    bool inducing, Parameters& parameters) {
  const configs::Model& model = config.model();
  const std::int64_t channels = model.channels(),
                     points = config.task().point_sets().set_transformer().inducing_points();
  const int entry = static_cast<int>(number % model.attention_size());
  return SetBlock(
      config, model.attention(entry), "model.attention." + std::to_string(entry),
      points > 0 ? KeySource::kMemory : KeySource::kOwnSequence,
      inducing ? InputWidths{channels, width} : InputWidths{width, points > 0 ? channels : width},
      noise_number(inducing ? NoiseLayers::kCrossAttention : NoiseLayers::kStack, number),
      std::max<std::int64_t>(config.data().sequence_length(), points),
      set_layer_name(number) + (inducing ? ".inducing" : ""), parameters);
}

}  // namespace

SetBlock::SetBlock(const configs::Config& config, const configs::Attention& attention,
                   const std::string& field, KeySource source, const InputWidths& inputs,
                   std::int64_t noise_number, std::int64_t num_points, const std::string& name,
                   Parameters& parameters)
    : dtype_(parameters.dtype()),
      attention_(MultiHeadAttention::between_sets(config.model(), attention, field, source, inputs,
                                                  noise_number, num_points, name + ".attention",
                                                  parameters)),
      attention_norm_(make_norm(config, name + ".attention_norm", parameters)),
      linear_(config.model(), WeightRole::kResidual, config.model().channels(),
              config.model().channels(), name + ".feed_forward", parameters) {
  output_norm_ = make_norm(config, name + ".output_norm", parameters);
}

at::Tensor SetBlock::operator()(const at::Tensor& x, const at::Tensor& y,
                                const std::optional<NoiseKey>& noise) const {
  SequenceContext context;
  context.memory.x_BSC = y;
  NamedSums sums;
  at::Tensor o_BNC = attention_.forward(x, context, noise, sums).to(dtype_);
  require(sums.empty(), "mechanisms that support sets have no sums");
  if (attention_norm_) o_BNC = attention_norm_->next(o_BNC, {}).x_BTC;
  const at::Tensor branch_BNC = at::relu(linear_(o_BNC));
  if (!output_norm_) return o_BNC + branch_BNC;
  return output_norm_->next(o_BNC, branch_BNC).x_BTC;
}

double SetBlock::forward_flops(std::int64_t num_x, std::int64_t num_y) const {
  return attention_.forward_flops(num_x, num_y) + static_cast<double>(num_x) * linear_.flops();
}

SetLayer::SetLayer(const configs::Config& config, std::int64_t number, std::int64_t width,
                   Parameters& parameters)
    : parameters_(parameters),
      unit_(parameters.begin_unit()),
      points_IC(make_inducing_points(config, number, parameters)),
      inducing_block_(points_IC.defined()
                          ? std::optional(make_block(config, number, width, true, parameters))
                          : std::nullopt),
      block_(make_block(config, number, width, false, parameters)) {}

at::Tensor SetLayer::operator()(const at::Tensor& x, const std::optional<NoiseKey>& noise) const {
  const ParameterUse use(parameters_, {unit_});
  at::Tensor summary_BIC;
  if (inducing_block_) {
    summary_BIC = (*inducing_block_)(for_each_set(points_IC, x.size(0)), x, noise);
  }
  return use.output(block_(x, summary_BIC, noise));
}

double SetLayer::forward_flops(std::int64_t num_points) const {
  if (!inducing_block_) return block_.forward_flops(num_points, num_points);
  const std::int64_t inducing = points_IC.size(0);
  return inducing_block_->forward_flops(inducing, num_points) +
         block_.forward_flops(num_points, inducing);
}

at::Tensor add_learned_points(std::int64_t count, std::int64_t channels, const std::string& name,
                              Parameters& parameters) {
  const auto sum = static_cast<double>(count + channels);
  return parameters.add(name, {count, channels}, Initializer::uniform(std::sqrt(6 / sum)),
                        /*decay=*/false);
}

at::Tensor for_each_set(const at::Tensor& points, std::int64_t batch) {
  return points.unsqueeze(0).expand({batch, -1, -1});
}

}  // namespace birkhoff
