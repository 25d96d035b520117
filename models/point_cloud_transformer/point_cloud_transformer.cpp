#include "models/point_cloud_transformer/point_cloud_transformer.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/max.h>
#include <ATen/ops/relu.h>

#include "configs/schema/config.pb.h"
#include "models/parallel/parameter_use.h"
#include "models/point_cloud_transformer/point_sampling.h"

namespace birkhoff {
namespace {

constexpr double kRelu = 0, kLeaky = 0.2;  // slopes for negative values

std::vector<OffsetAttention> make_attention_layers(const configs::Config& config,
                                                   Parameters& parameters) {
  std::vector<OffsetAttention> layers;
  layers.reserve(static_cast<std::size_t>(config.model().layers()));
  for (std::int64_t i = 0; i < config.model().layers(); ++i)
    layers.emplace_back(config, i, parameters);
  return layers;
}

// The maximum over a dimension. Of equal elements, one gets the gradient.
at::Tensor max_over(const at::Tensor& x, std::int64_t dim) { return std::get<0>(at::max(x, dim)); }

}  // namespace

NeighborStage::NeighborStage(const configs::Config& config, std::int64_t inputs,
                             std::int64_t outputs, const std::string& name, Parameters& parameters)
    : neighbors_(config.task().point_sets().point_cloud_transformer().neighbors()),
      inputs_(inputs),
      compute_dtype_(parameters.compute_dtype()),
      weight_OI(parameters.add(name + ".first.weight", {outputs, 2 * inputs},
                               weight_init(config.model(), WeightRole::kInner, 2 * inputs),
                               /*decay=*/true)),
      norm_(make_batch_norm(config, outputs, name + ".first_norm", parameters)),
      second_(config, outputs, outputs, kRelu, name + ".second", parameters) {}

PointFeatures NeighborStage::operator()(const PointFeatures& in, bool training,
                                        NamedSums& sums) const {
  const at::Tensor kept_BS = farthest_points(in.points_BNP, in.points_BNP.size(1) / 2);
  const at::Tensor centers_BSP = rows_at(in.points_BNP, kept_BS);
  const at::Tensor near_BSK = nearest_points(in.points_BNP, centers_BSP, neighbors_);
  // [x_n - x_c, x_c] [W, V]^T = x_n W^T + x_c (V - W)^T: a product for each point instead of one
  // for each neighbor.
  const at::Tensor x_BNI = in.x_BNC.to(compute_dtype_);
  const at::Tensor weight = weight_OI.to(compute_dtype_),
                   of_neighbor = weight.narrow(1, 0, inputs_),
                   of_center = weight.narrow(1, inputs_, inputs_) - of_neighbor;
  const auto dtype = in.x_BNC.scalar_type();
  const at::Tensor first_BSKO =
      rows_at(at::linear(x_BNI, of_neighbor).to(dtype), near_BSK) +
      at::linear(rows_at(x_BNI, kept_BS), of_center).to(dtype).unsqueeze(2);
  const at::Tensor hidden_BSKO = at::relu(norm_(first_BSKO, training, sums));
  return {centers_BSP, max_over(second_(hidden_BSKO, training, sums), 2)};
}

double NeighborStage::forward_flops(std::int64_t num_points) const {
  const auto N = static_cast<double>(num_points), K = static_cast<double>(neighbors_);
  const double product = 2 * static_cast<double>(weight_OI.size(0) * inputs_);
  return N * product + N / 2 * (product + K * second_.flops());
}

PointCloudTransformer::PointCloudTransformer(const configs::Config& config,
                                             const ModelPlacement& place)
    : PointClassifier(config, place),
      dropout_(config.task().point_sets().point_cloud_transformer().dropout()),
      first_unit_(parameters_.begin_unit()),
      embed_1_(config, config.task().point_sets().dimensions(), config.model().channels() / 4,
               kRelu, "embedding.0", parameters_),
      embed_2_(config, config.model().channels() / 4, config.model().channels() / 4, kRelu,
               "embedding.1", parameters_),
      stage_1_(config, config.model().channels() / 4, config.model().channels() / 2, "stages.0",
               parameters_),
      stage_2_(config, config.model().channels() / 2, config.model().channels(), "stages.1",
               parameters_),
      mix_1_(config, config.model().channels(), config.model().channels(), kRelu, "mix.0",
             parameters_),
      mix_2_(config, config.model().channels(), config.model().channels(), kRelu, "mix.1",
             parameters_),
      layers_(make_attention_layers(config, parameters_)),
      last_unit_(parameters_.begin_unit()),
      fuse_(config, (config.model().layers() + 1) * config.model().channels(),
            4 * config.model().channels(), kLeaky, "fuse", parameters_),
      hidden_1_(config, 4 * config.model().channels(), 2 * config.model().channels(), kLeaky,
                "hidden.0", parameters_),
      hidden_2_(config, 2 * config.model().channels(), config.model().channels(), kLeaky,
                "hidden.1", parameters_),
      output_(config.model(), WeightRole::kEmbedding, config.model().channels(),
              config.task().point_sets().classes(), "output", parameters_) {}

at::Tensor PointCloudTransformer::logits(const at::Tensor& points_BNP,
                                         const std::optional<NoiseKey>& noise,
                                         NamedSums& sums) const {
  const bool training = noise.has_value();
  at::Tensor x_BSC;
  std::vector<at::Tensor> all_BSC;
  {
    const ParameterUse use(parameters_, {first_unit_});
    const at::Tensor embedded_BNC = embed_2_(embed_1_(points_BNP, training, sums), training, sums);
    const PointFeatures kept =
        stage_2_(stage_1_({points_BNP, embedded_BNC}, training, sums), training, sums);
    x_BSC = mix_2_(mix_1_(kept.x_BNC, training, sums), training, sums);
    // Both outputs of this part, as one.
    const at::Tensor both = use.output(at::cat({x_BSC, kept.x_BNC}, 2));
    const std::vector<at::Tensor> parts = both.chunk(2, 2);
    x_BSC = parts[0];
    all_BSC.push_back(parts[1]);
  }
  for (const OffsetAttention& layer : layers_) {
    x_BSC = layer(x_BSC, training, sums);
    all_BSC.push_back(x_BSC);
  }
  const ParameterUse use(parameters_, {last_unit_});
  const at::Tensor pooled_BC = max_over(fuse_(at::cat(all_BSC, 2), training, sums), 1);
  const at::Tensor first_BC =
      dropped(hidden_1_(pooled_BC, training, sums), dropout_, noise, RandomStream::kAttention);
  const at::Tensor second_BC =
      dropped(hidden_2_(first_BC, training, sums), dropout_, noise, RandomStream::kFeedForward);
  return use.output(output_(second_BC));
}

double PointCloudTransformer::forward_flops_per_sequence() const {
  const std::int64_t N = num_points();
  const auto all = static_cast<double>(N), kept = all / 4;
  double flops = all * (embed_1_.flops() + embed_2_.flops()) + stage_1_.forward_flops(N) +
                 stage_2_.forward_flops(N / 2) +
                 kept * (mix_1_.flops() + mix_2_.flops() + fuse_.flops());
  for (const OffsetAttention& layer : layers_) flops += layer.forward_flops(N / 4);
  return flops + hidden_1_.flops() + hidden_2_.flops() + output_.flops();
}

}  // namespace birkhoff
