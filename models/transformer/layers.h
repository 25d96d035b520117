// The layers every block is made of: linear, layer norm, feed-forward.
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

// Where a matrix stands in the network; decides how it starts (configs.Model.Init).
enum class WeightRole {
  kEmbedding,  // rows are looked up, or are an output layer's classes
  kInner,
  kResidual,  // its outputs are added to the residual stream
};
Init weight_init(const configs::Model& config, WeightRole role, std::int64_t fan_in);

// Numbers the consumers of noise in a model, so that no two share a stream (NoiseKey::at_layer).
enum class NoiseConsumer : std::uint32_t { kAttention = 0, kFeedForward = 1, kHeadGroup = 2 };
inline constexpr std::uint32_t kMostHeadGroups = 254;
inline std::uint32_t noise_layer(std::int64_t block, NoiseConsumer consumer,
                                 std::size_t head_group = 0) {
  return static_cast<std::uint32_t>(block) * (kMostHeadGroups + 2) +
         static_cast<std::uint32_t>(consumer) + static_cast<std::uint32_t>(head_group);
}

// y[..., O] = x[..., I] weight[O, I]^T + bias[O], in the parameters' compute dtype: where that is
// not their own, weight and bias are rounded when used, and their gradients are widened before they
// are added up.
class Linear {
 public:
  Linear(const configs::Model& config, WeightRole role, std::int64_t inputs, std::int64_t outputs,
         const std::string& name, Parameters& parameters);

  at::Tensor operator()(const at::Tensor& x) const;
  // Forward FLOPs of one row.
  double flops() const { return 2.0 * static_cast<double>(weight_OI.numel()); }

 private:
  at::Tensor weight_OI, bias_O;  // bias undefined where the model has none
  at::ScalarType compute_dtype_;
};

// The residual stream between two sublayers is x + branch. What the sublayer before gave stands
// aside until the next norm adds it, so that both are one pass over memory.
struct ResidualStream {
  at::Tensor x_BTC;       // of the parameters' dtype
  at::Tensor branch_BTC;  // of theirs or the compute dtype; undefined: nothing to add
};

// Layer norm over the last dim (Ba et al. 2016), computed in the parameters' dtype.
class LayerNorm {
 public:
  LayerNorm(const configs::Model& config, const std::string& name, Parameters& parameters);

  struct Output {
    at::Tensor sum_BTC;  // of the stream
    at::Tensor
        normed_BTC;  // its norm; on a GPU of the branch's dtype, for the layers that round it
  };
  // One kernel on a GPU where there is a branch.
  Output operator()(const ResidualStream& stream) const;

 private:
  at::Tensor weight_C, bias_C;
  double epsilon_;
};

// down(dropout(activation(up(x)))) (Vaswani et al. 2017, section 3.3).
class FeedForward {
 public:
  FeedForward(const configs::Model& config, const std::string& name, Parameters& parameters);

  // noise is at this layer's number already.
  at::Tensor operator()(const at::Tensor& x_BTC, const std::optional<NoiseKey>& noise) const;
  double flops() const { return up_.flops() + down_.flops(); }

 private:
  Linear up_, down_;
  bool relu_;
  float dropout_;
};

}  // namespace birkhoff
