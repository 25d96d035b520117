#include "models/transformer/layers.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/relu.h>

#include <cmath>

#include "cluster/base/error.h"
#include "configs/schema/config.pb.h"
#include "models/transformer/gelu.h"
#include "models/transformer/residual_norm.h"

namespace birkhoff {

namespace {

at::Tensor (*activation_of(const configs::Model& config))(const at::Tensor&) {
  switch (config.activation()) {
    case configs::Model::gelu:
      return &gelu;
    case configs::Model::relu:
      return &at::relu;
    case configs::Model::geglu:
      return &geglu;
  }
  require(false, "model.activation has a value outside its enum");
  return nullptr;
}

}  // namespace

Initializer weight_init(const configs::Model& config, WeightRole role, std::int64_t fan_in) {
  switch (config.init()) {
    case configs::Model::normal: {
      // GPT-2: the residual stream is the sum of the sublayers' outputs; its variance should not
      // grow with their number.
      const double sublayers = (config.has_encoder() ? 3.0 : 2.0) * config.layers();
      const double outputs = role == WeightRole::kResidual ? sublayers : 1.0;
      return Initializer::normal(0.02 / std::sqrt(outputs));
    }
    case configs::Model::uniform_unit_scaling:
      // T2T: embeddings are N(0, 1 / channels), so that scale_embeddings gives them unit variance.
      if (role == WeightRole::kEmbedding) {
        return Initializer::normal(1.0 / std::sqrt(static_cast<double>(config.channels())));
      }
      return Initializer::uniform(std::sqrt(3.0 / static_cast<double>(fan_in)));
  }
  require(false, "model.init has a value outside its enum");
  return {};
}

std::int64_t embedding_width(const configs::Model& config) {
  return config.embedding_channels() > 0 ? config.embedding_channels() : config.channels();
}

Linear::Linear(const configs::Model& config, WeightRole role, std::int64_t inputs,
               std::int64_t outputs, const std::string& name, Parameters& parameters)
    : weight_OI(parameters.add(name + ".weight", {outputs, inputs},
                               weight_init(config, role, inputs), /*decay=*/true)),
      compute_dtype_(parameters.compute_dtype()) {
  if (config.bias()) {
    bias_O = parameters.add(name + ".bias", {outputs}, Initializer::zeros(), /*decay=*/false);
  }
}

at::Tensor Linear::operator()(const at::Tensor& x) const {
  const auto rounded = [&](const at::Tensor& tensor) { return tensor.to(compute_dtype_); };
  return bias_O.defined() ? at::linear(rounded(x), rounded(weight_OI), rounded(bias_O))
                          : at::linear(rounded(x), rounded(weight_OI));
}

LayerNorm::LayerNorm(const configs::Model& config, const std::string& name, Parameters& parameters)
    : weight_C(parameters.add(name + ".weight", {config.channels()}, Initializer::ones(),
                              /*decay=*/false)),
      epsilon_(config.norm_epsilon()) {
  if (config.bias()) {
    bias_C =
        parameters.add(name + ".bias", {config.channels()}, Initializer::zeros(), /*decay=*/false);
  }
}

LayerNorm::Output LayerNorm::operator()(const ResidualStream& stream) const {
  const auto& [x_BTC, branch_BTC] = stream;
  if (branch_BTC.defined() && x_BTC.is_cuda()) {
    const auto [sum_BTC, normed_BTC] = add_and_norm(x_BTC, branch_BTC, weight_C, bias_C, epsilon_);
    return {sum_BTC, normed_BTC};
  }
  const at::Tensor sum_BTC = branch_BTC.defined() ? x_BTC + branch_BTC : x_BTC;
  const auto bias = bias_C.defined() ? std::optional<at::Tensor>(bias_C) : std::nullopt;
  return {sum_BTC, at::layer_norm(sum_BTC, weight_C.sizes(), weight_C, bias, epsilon_)};
}

FeedForward::FeedForward(const configs::Model& config, const std::string& name,
                         Parameters& parameters)
    : up_(config, WeightRole::kInner, config.channels(),
          (config.activation() == configs::Model::geglu ? 2 : 1) * config.feed_forward(),
          name + ".up", parameters),
      down_(config, WeightRole::kResidual, config.feed_forward(), config.channels(), name + ".down",
            parameters),
      activate_(activation_of(config)),
      dropout_(config.dropout().activation()) {}

at::Tensor FeedForward::operator()(const at::Tensor& x_BTC,
                                   const std::optional<NoiseKey>& noise) const {
  at::Tensor hidden_BTF = activate_(up_(x_BTC));
  if (noise) {
    hidden_BTF = philox_dropout(hidden_BTF, dropout_, *noise, NoisePurpose::kActivationDropout);
  }
  return down_(hidden_BTF);
}

}  // namespace birkhoff
