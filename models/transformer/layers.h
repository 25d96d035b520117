// The parts of a Transformer layer: linear, layer norm, feed-forward.
//
// Legend: C channels, F feed-forward width, I inputs, O outputs, ... leading dims (batch, tokens).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>

#include "cluster/base/random/philox.h"
#include "cluster/base/tensors/parameters.h"

namespace birkhoff::configs {
class Model;
}

namespace birkhoff {

// The role of a matrix in the network. It decides how the matrix is initialized
// (configs.Model.Init).
enum class WeightRole {
  kEmbedding,  // its rows are looked up, or are the classes of an output layer
  kInner,
  kResidual,  // its outputs are added to the residual stream
};
Initializer weight_init(const configs::Model& config, WeightRole role, std::int64_t fan_in);

// The columns of the embedding table.
std::int64_t embedding_width(const configs::Model& config);

// Numbers the consumers of noise in a model, so that no two share a random stream
// (NoiseKey::at_layer). `layer` is a noise_number().
enum class RandomStream : std::uint32_t { kAttention = 0, kFeedForward = 1, kHeadGroup = 2 };
inline constexpr std::uint32_t kMaxHeadGroups = 254;
inline std::uint32_t noise_layer(std::int64_t layer, RandomStream consumer,
                                 std::size_t head_group = 0) {
  return static_cast<std::uint32_t>(layer) * (kMaxHeadGroups + 2) +
         static_cast<std::uint32_t>(consumer) + static_cast<std::uint32_t>(head_group);
}

// Numbers the layers of a model's stacks for noise_layer(). Cross-attention has numbers of its own.
enum class NoiseLayers { kStack = 0, kCrossAttention = 1, kSourceEncoder = 2 };
inline constexpr std::int64_t kMaxLayers = 4096;  // of a stack
inline std::int64_t noise_number(NoiseLayers layers, std::int64_t number) {
  return static_cast<std::int64_t>(layers) * kMaxLayers + number;
}

// y[..., O] = x[..., I] weight[O, I]^T + bias[O], in the parameters' compute dtype. If it differs
// from the dtype that they are stored in, weight and bias are rounded when used, and their
// gradients are widened before they are added up.
class Linear {
 public:
  Linear(const configs::Model& config, WeightRole role, std::int64_t inputs, std::int64_t outputs,
         const std::string& name, Parameters& parameters);

  at::Tensor operator()(const at::Tensor& x) const;
  // Forward FLOPs of one row.
  double flops() const { return 2.0 * static_cast<double>(weight_OI.numel()); }

 private:
  at::Tensor weight_OI, bias_O;  // bias_O is undefined if the model has no biases
  at::ScalarType compute_dtype_;
};

// The residual stream between two sublayers is x + branch. `branch`, the output of the previous
// sublayer, is added by the next norm, so that addition and norm share one pass over memory.
struct ResidualStream {
  at::Tensor x_BTC;       // in the parameters' dtype
  at::Tensor branch_BTC;  // in that dtype or the compute dtype; undefined: nothing to add
};

// Layer norm over the last dim (Ba et al. 2016), computed in the parameters' dtype.
class LayerNorm {
 public:
  LayerNorm(const configs::Model& config, const std::string& name, Parameters& parameters);

  struct Output {
    at::Tensor sum_BTC;  // x + branch
    // The norm of sum_BTC. On a GPU it has the dtype of the branch, if there is one: the layers
    // that use it round it to that anyway.
    at::Tensor normed_BTC;
  };
  // A single kernel on a GPU if there is a branch.
  Output operator()(const ResidualStream& stream) const;

 private:
  at::Tensor weight_C, bias_C;
  double epsilon_;
};

// down(dropout(activation(up(x)))) (Vaswani et al. 2017, section 3.3).
class FeedForward {
 public:
  FeedForward(const configs::Model& config, const std::string& name, Parameters& parameters);

  // `noise` is already keyed by this layer's number.
  at::Tensor operator()(const at::Tensor& x_BTC, const std::optional<NoiseKey>& noise) const;
  double flops() const { return up_.flops() + down_.flops(); }

 private:
  Linear up_, down_;                           // up_ is twice as wide if the activation has a gate
  at::Tensor (*activate_)(const at::Tensor&);  // of the outputs of up_
  float dropout_;
};

}  // namespace birkhoff
