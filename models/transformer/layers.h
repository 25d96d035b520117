// The parts of a Transformer layer: linear, layer norm, feed-forward.
//
// With tensor parallelism (token_slices.h) the residual stream and what is between two sublayers
// are slices [n, C] instead of [B, T, C].
//
// Legend: C channels, F feed-forward width, I inputs, O outputs, ... leading dims (batch, tokens).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cluster/base/random/philox.h"
#include "cluster/base/tensors/parameters.h"
#include "models/parallel/token_slices.h"
#include "models/transformer/activation/activation.h"

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

// The channels of a head.
std::int64_t head_width(const configs::Model& config);

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

// Which side of a linear layer is divided over the tensor axis: the dimension of its weight.
enum class LinearSplit { kNone = -1, kOutputs = 0, kInputs = 1 };

// y[..., O] = x[..., I] weight[O, I]^T + bias[O], in the parameters' compute dtype
// (cluster/base/tensors/rounded_linear.h). A layer that is split is used at most once in a pass.
class Linear {
 public:
  // `sections`: the widths of consecutive ranges of the side that is split, each of which is
  // divided evenly over the ranks; empty: the whole side is one.
  Linear(const configs::Model& config, WeightRole role, std::int64_t inputs, std::int64_t outputs,
         const std::string& name, Parameters& parameters, LinearSplit split = LinearSplit::kNone,
         const std::vector<std::int64_t>& sections = {});

  // Without a split: of any x. With split outputs: from a slice [n, I] to this rank's outputs
  // [B, T, O]; with split inputs: from this rank's inputs [B, T, I] to a slice [n, O]. Collective
  // over the tensor axis if the layer is split.
  at::Tensor operator()(const at::Tensor& x, const TokenSlices& tokens = {}) const;
  // Without the bias, for layers that do not split inputs.
  at::Tensor without_bias(const at::Tensor& x, const TokenSlices& tokens) const;
  // This rank's part, in the parameters' dtype; undefined if the model has no biases.
  const at::Tensor& bias() const { return bias_O; }
  // Without a split: only the outputs from `first` on.
  at::Tensor outputs_from(std::int64_t first, const at::Tensor& x) const;
  // With split outputs: y, and x of all tokens.
  TokenSlices::Product gathered(const at::Tensor& x, const TokenSlices& tokens) const;
  // The weight [O, I] of a layer without a split.
  const at::Tensor& weight() const { return weights_OI[0]; }
  // Forward FLOPs of one row, on all ranks of the tensor axis together.
  double flops() const { return flops_; }

 private:
  at::Tensor rounded(const at::Tensor& x) const { return x.to(compute_dtype_); }
  // With split inputs: the slice of y without the bias.
  at::Tensor sum_of_products(const at::Tensor& x_BTI, const TokenSlices& tokens) const;
  TokenSlices::Product product(const at::Tensor& x, const TokenSlices& tokens,
                               const at::Tensor& bias) const;

  // One weight, or one for each section of split inputs.
  std::vector<at::Tensor> weights_OI;
  at::Tensor bias_O;  // undefined if the model has no biases
  at::ScalarType compute_dtype_;
  LinearSplit split_;
  double flops_;
};

// The residual stream between two sublayers is x + branch. `branch`, the output of the previous
// sublayer, is added by the next norm, so that addition and norm share one pass over memory. After
// a post-norm layer (model.norm), whose last norm adds it, there is no branch.
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
    // The norm of sum_BTC, for layers that round it to the compute dtype. On a GPU it has the dtype
    // of the branch, or without a branch the compute dtype.
    at::Tensor normed_BTC;
  };
  // A single kernel on a GPU for multiples of 4 up to 8,192 channels.
  Output operator()(const ResidualStream& stream) const;
  // The norm of x + branch as the next residual stream: in the parameters' dtype.
  ResidualStream next(const at::Tensor& x_BTC, const at::Tensor& branch_BTC) const;

 private:
  Output apply(const ResidualStream& stream, at::ScalarType dtype) const;

  at::Tensor weight_C, bias_C;
  at::ScalarType compute_dtype_;
  double epsilon_;
};

// down(dropout(activation(up(x)))) (Vaswani et al. 2017, section 3.3).
class FeedForward {
 public:
  FeedForward(const configs::Model& config, const std::string& name, Parameters& parameters);

  // `noise` is already keyed by this layer's number.
  at::Tensor operator()(const at::Tensor& x_BTC, const TokenSlices& tokens,
                        const std::optional<NoiseKey>& noise) const;
  double flops() const { return up_.flops() + down_.flops(); }

 private:
  Linear up_, down_;  // up_ is twice as wide if the activation has a gate
  ActivationKind activation_;
  std::int64_t width_;  // F, on all ranks of the tensor axis
  float dropout_;
};

}  // namespace birkhoff
