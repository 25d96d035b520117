#include "models/transformer/layers.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/layer_norm.h>

#include <cmath>
#include <numeric>

#include "cluster/base/error.h"
#include "cluster/base/tensors/rounded_linear.h"
#include "configs/schema/config.pb.h"
#include "models/transformer/residual_norm.h"

namespace birkhoff {

namespace {

ActivationKind activation_of(const configs::Model& config) {
  switch (config.activation()) {
    case configs::Model::gelu:
      return ActivationKind::kGelu;
    case configs::Model::relu:
      return ActivationKind::kRelu;
    case configs::Model::geglu:
      return ActivationKind::kGeglu;
  }
  require(false, "model.activation has a value outside its enum");
  return {};
}

// The outputs of a FeedForward's first layer: with gates, these come first.
std::vector<std::int64_t> up_widths(const configs::Model& config) {
  const int count = config.activation() == configs::Model::geglu ? 2 : 1;
  return std::vector<std::int64_t>(static_cast<std::size_t>(count), config.feed_forward());
}

std::int64_t sum_of(const std::vector<std::int64_t>& widths) {
  return std::accumulate(widths.begin(), widths.end(), std::int64_t{0});
}

}  // namespace

Initializer weight_init(const configs::Model& config, WeightRole role, std::int64_t fan_in) {
  switch (config.init()) {
    case configs::Model::normal: {
      // GPT-2: the residual stream is the sum of the sublayers' outputs; its variance should not
      // grow with their number.
      const double of_layer = 1.0 + config.has_encoder() + !config.attention_only();
      const double sublayers = of_layer * config.layers();
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

std::int64_t head_width(const configs::Model& config) {
  return config.head_channels() > 0 ? config.head_channels() : config.channels() / config.heads();
}

Linear::Linear(const configs::Model& config, WeightRole role, std::int64_t inputs,
               std::int64_t outputs, const std::string& name, Parameters& parameters,
               LinearSplit split, const std::vector<std::int64_t>& sections)
    : compute_dtype_(parameters.compute_dtype()),
      split_(parameters.place().tensor_size > 1 ? split : LinearSplit::kNone),
      flops_(2 * static_cast<double>(inputs) * static_cast<double>(outputs)) {
  std::vector<Interval> ranges;
  for (const std::int64_t width : sections) {
    const std::int64_t begin = ranges.empty() ? 0 : ranges.back().end;
    ranges.push_back({begin, begin + width});
  }
  const auto add_weight = [&](const Split& divided) {
    weights_OI.push_back(parameters.add(name + ".weight", {outputs, inputs},
                                        weight_init(config, role, inputs), /*decay=*/true,
                                        divided));
  };
  if (split_ == LinearSplit::kInputs && ranges.size() > 1) {
    for (const Interval& range : ranges) add_weight({.dim = 1, .sections = {range}});
  } else {
    add_weight({.dim = static_cast<int>(split_), .sections = ranges});
  }
  if (config.bias()) {
    bias_O = parameters.add(
        name + ".bias", {outputs}, Initializer::zeros(), /*decay=*/false,
        split_ == LinearSplit::kOutputs ? Split{.dim = 0, .sections = ranges} : Split{});
  }
}

at::Tensor Linear::operator()(const at::Tensor& x, const TokenSlices& tokens) const {
  if (split_ != LinearSplit::kInputs) return gathered(x, tokens).y_BTO;
  const at::Tensor y_nO = sum_of_products(rounded(x), tokens);
  return bias_O.defined() ? y_nO + rounded(bias_O) : y_nO;
}

at::Tensor Linear::sum_of_products(const at::Tensor& x_BTI, const TokenSlices& tokens) const {
  if (weights_OI.size() == 1) return tokens.linear_sum(x_BTI, weights_OI[0]);
  at::Tensor part_BTO;
  std::int64_t first = 0;
  for (const at::Tensor& weight_OI : weights_OI) {
    const std::int64_t width = weight_OI.size(1);
    const at::Tensor y = rounded_linear(x_BTI.narrow(-1, first, width), weight_OI, {});
    part_BTO = part_BTO.defined() ? part_BTO + y : y;
    first += width;
  }
  return tokens.sum(part_BTO);
}

at::Tensor Linear::outputs_from(std::int64_t first, const at::Tensor& x) const {
  require(split_ == LinearSplit::kNone, "a part of the outputs of a layer that is not split");
  const auto part = [first](const at::Tensor& of_outputs) {
    return of_outputs.narrow(0, first, of_outputs.size(0) - first);
  };
  return rounded_linear(rounded(x), part(weights_OI[0]), bias_O.defined() ? part(bias_O) : bias_O);
}

TokenSlices::Product Linear::product(const at::Tensor& x, const TokenSlices& tokens,
                                     const at::Tensor& bias) const {
  const bool whole = split_ == LinearSplit::kNone;
  TokenSlices::Product product =
      (whole ? TokenSlices() : tokens)
          .gather_linear(rounded(x), weights_OI[0], bias, /*used_once=*/true);
  if (whole) product.x_BTC = x;
  return product;
}

TokenSlices::Product Linear::gathered(const at::Tensor& x, const TokenSlices& tokens) const {
  return product(x, tokens, bias_O);
}

at::Tensor Linear::without_bias(const at::Tensor& x, const TokenSlices& tokens) const {
  require(split_ != LinearSplit::kInputs, "a layer of split inputs adds its bias to a slice");
  return product(x, tokens, {}).y_BTO;
}

LayerNorm::LayerNorm(const configs::Model& config, const std::string& name, Parameters& parameters)
    : weight_C(parameters.add(name + ".weight", {config.channels()}, Initializer::ones(),
                              /*decay=*/false)),
      compute_dtype_(parameters.compute_dtype()),
      epsilon_(config.norm_epsilon()) {
  if (config.bias()) {
    bias_C =
        parameters.add(name + ".bias", {config.channels()}, Initializer::zeros(), /*decay=*/false);
  }
}

LayerNorm::Output LayerNorm::operator()(const ResidualStream& stream) const {
  const at::Tensor& branch_BTC = stream.branch_BTC;
  return apply(stream, branch_BTC.defined() ? branch_BTC.scalar_type() : compute_dtype_);
}

LayerNorm::Output LayerNorm::apply(const ResidualStream& stream, at::ScalarType dtype) const {
  const auto& [x_BTC, branch_BTC] = stream;
  if (x_BTC.is_cuda()) {
    const auto [sum_BTC, normed_BTC] =
        add_and_norm(x_BTC, branch_BTC, weight_C, bias_C, epsilon_, dtype);
    return {sum_BTC, normed_BTC};
  }
  const at::Tensor sum_BTC = branch_BTC.defined() ? x_BTC + branch_BTC : x_BTC;
  const auto bias = bias_C.defined() ? std::optional<at::Tensor>(bias_C) : std::nullopt;
  return {sum_BTC, at::layer_norm(sum_BTC, weight_C.sizes(), weight_C, bias, epsilon_)};
}

ResidualStream LayerNorm::next(const at::Tensor& x_BTC, const at::Tensor& branch_BTC) const {
  const at::ScalarType dtype = x_BTC.scalar_type();
  const at::Tensor branch = branch_BTC.defined() ? branch_BTC.to(dtype) : branch_BTC;
  return {apply({x_BTC, branch}, dtype).normed_BTC, {}};
}

FeedForward::FeedForward(const configs::Model& config, const std::string& name,
                         Parameters& parameters)
    : up_(config, WeightRole::kInner, config.channels(), sum_of(up_widths(config)), name + ".up",
          parameters, LinearSplit::kOutputs, up_widths(config)),
      down_(config, WeightRole::kResidual, config.feed_forward(), config.channels(), name + ".down",
            parameters, LinearSplit::kInputs),
      activation_(activation_of(config)),
      width_(config.feed_forward()),
      dropout_(config.dropout().activation()) {}

at::Tensor FeedForward::operator()(const at::Tensor& x_BTC, const TokenSlices& tokens,
                                   const std::optional<NoiseKey>& noise) const {
  // A GPU's kernel of the activation adds the bias, and adds up its gradient: a pass over memory
  // less. On a CPU the product adds it.
  at::Tensor hidden_BTF = x_BTC.is_cuda()
                              ? activate(activation_, up_.without_bias(x_BTC, tokens), up_.bias())
                              : activate(activation_, up_(x_BTC, tokens), {});
  if (noise) {
    hidden_BTF =
        tokens.drop_columns(hidden_BTF, width_, dropout_, *noise, NoisePurpose::kActivationDropout);
  }
  return down_(hidden_BTF, tokens);
}

}  // namespace birkhoff
