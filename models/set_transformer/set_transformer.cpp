#include "models/set_transformer/set_transformer.h"

#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>

#include "cluster/base/error.h"
#include "configs/loader/check.h"
#include "configs/schema/config.pb.h"
#include "models/parallel/parameter_use.h"
#include "models/transformer/recompute.h"
#include "models/transformer/stack.h"

namespace birkhoff {
namespace {

const configs::SetTransformer& network_of(const configs::Config& config) {
  return config.task().point_sets().set_transformer();
}

// The channels of the points, or of the outputs of that number of layers.
std::int64_t width_after(const configs::Config& config, std::int64_t layers) {
  return layers == 0 ? config.task().point_sets().dimensions() : config.model().channels();
}

std::vector<SetLayer> make_layers(const configs::Config& config, Parameters& parameters) {
  std::vector<SetLayer> layers;
  layers.reserve(static_cast<std::size_t>(config.model().layers()));
  for (std::int64_t i = 0; i < config.model().layers(); ++i) {
    layers.emplace_back(config, i, width_after(config, i), parameters);
  }
  return layers;
}

bool pools_as_layers(const configs::Config& config) {
  return network_of(config).pooling_attention() == configs::SetTransformer::as_layers;
}

// The attention of the pooling, and its path in the configuration.
configs::Attention pooling_attention(const configs::Config& config) {
  if (pools_as_layers(config)) return config.model().attention(0);
  return default_attention(config.model().heads());
}

SetBlock make_pooling(const configs::Config& config, Parameters& parameters) {
  const configs::Model& model = config.model();
  return SetBlock(config, pooling_attention(config),
                  pools_as_layers(config) ? "model.attention.0" : "the pooling's attention",
                  KeySource::kMemory, {model.channels(), width_after(config, model.layers())},
                  noise_number(NoiseLayers::kSourceEncoder, 0),
                  std::max(config.data().sequence_length(), network_of(config).seeds()), "pooling",
                  parameters);
}

}  // namespace

SetTransformer::SetTransformer(const configs::Config& config, const ModelPlacement& place)
    : PointClassifier(config, place),
      dropout_(network_of(config).dropout()),
      recompute_(config.train().recompute()),
      layers_(make_layers(config, parameters_)),
      last_unit_(parameters_.begin_unit()),
      seeds_SC(add_learned_points(network_of(config).seeds(), config.model().channels(),
                                  "pooling.seeds", parameters_)),
      pooling_(make_pooling(config, parameters_)),
      output_(config.model(), WeightRole::kEmbedding,
              network_of(config).seeds() * config.model().channels(),
              config.task().point_sets().classes(), "output", parameters_) {}

at::Tensor SetTransformer::logits(const at::Tensor& points_BNP,
                                  const std::optional<NoiseKey>& noise, NamedSums& /*sums*/) const {
  at::Tensor x_BNC = points_BNP;
  if (recompute_ && c10::GradMode::is_enabled()) {
    // Only parts whose inputs have gradients are recomputed.
    x_BNC = x_BNC.detach().set_requires_grad(true);
  }
  for (const SetLayer& layer : layers_) {
    x_BNC = recompute_ ? recomputed(
                             [&layer, noise](const std::vector<at::Tensor>& inputs) {
                               return std::vector<at::Tensor>{layer(inputs[0], noise)};
                             },
                             {x_BNC})[0]
                       : layer(x_BNC, noise);
  }
  x_BNC = dropped(x_BNC, dropout_, noise, RandomStream::kAttention);
  const ParameterUse use(parameters_, {last_unit_});
  const at::Tensor pooled_BSC = pooling_(for_each_set(seeds_SC, x_BNC.size(0)), x_BNC, noise);
  return use.output(
      output_(dropped(pooled_BSC, dropout_, noise, RandomStream::kFeedForward).flatten(1)));
}

double SetTransformer::forward_flops_per_sequence() const {
  double flops = pooling_.forward_flops(seeds_SC.size(0), num_points()) + output_.flops();
  for (const SetLayer& layer : layers_) flops += layer.forward_flops(num_points());
  return flops;
}

std::vector<std::string> SetTransformer::warnings() const {
  if (seeds_SC.size(0) > 1 || !pooling_.balances_keys()) return {};
  return {
      "pooling: with one seed, doubly stochastic attention gives all points the same weight, and its "
      "queries and keys learn nothing; set task.point_sets.set_transformer.pooling_attention to "
      "softmax, or more seeds, unless you want their mean"};
}

}  // namespace birkhoff
