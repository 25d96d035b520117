// A stack of layers, with a norm after the last one unless layers end in a norm (model.norm: post):
// what all models have in common, whatever their inputs and outputs are.
//
// Legend: B batch, N layers, T tokens, M tokens before them, S tokens of the memory, C channels.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "models/transformer/decode_cache.h"
#include "models/transformer/layers.h"
#include "models/transformer/transformer_layer.h"

namespace birkhoff::configs {
class Config;
}

namespace birkhoff {

// No parameters yet: their device, dtypes (train.precision) and seed.
Parameters make_parameters(const configs::Config& config, const ModelPlacement& place);

// The recurrence of Transformer-XL (configs.Memory): the inputs of each layer at the tokens before
// a sequence, which its keys and values are computed from, too. No gradients.
struct Past {
  at::Tensor inputs_BNMC{};  // undefined: there are no such tokens
  std::int64_t max_tokens = 0;
  // Set by the forward pass: what the next sequence has as inputs, of at most max_tokens tokens. In
  // the dtype of the parameters.
  at::Tensor next_BNMC{};
};

class Stack {
 public:
  // config must be resolved. `parameters` must outlive it; names begin with stack_prefix(role).
  // Error(kConfig) if a mechanism does not fit its place in the stack.
  Stack(const configs::Config& config, StackRole role, Parameters& parameters);

  // The outputs [B, T, C] of the last norm, in the compute dtype, for inputs x [B, T, C] in the
  // dtype of the parameters; slices of both if context.tokens is divided. Collective then over the
  // tensor axis, as is the backward pass. Outputs of padding have no meaning. Appends the layers'
  // sums. Only a kTargetDecoder reads a memory: Error(kInternal). past: null: none; on one rank of
  // the tensor axis.
  at::Tensor forward(const at::Tensor& x_BTC, const SequenceContext& context,
                     const std::optional<NoiseKey>& noise, NamedSums& sums,
                     Past* past = nullptr) const;
  // The outputs of a kSourceEncoder as a memory for a kTargetDecoder. No segments.
  Memory encode(const at::Tensor& x_BSC, const SequenceContext& context,
                const std::optional<NoiseKey>& noise, NamedSums& sums) const;

  // As in models/decoder.h, except that a step takes inputs x [B, 1, C] and returns outputs of that
  // shape, or slices. `memory`: as in forward().
  std::unique_ptr<DecodeCache> decode_cache(std::int64_t batch, const Memory& memory = {}) const;
  at::Tensor decode_step(DecodeCache& cache, const at::Tensor& x_BTC,
                         const TokenSlices& tokens) const;

  // Of one sequence of `num_tokens`, with a memory of `memory_tokens`, after `past_tokens`.
  double forward_flops(std::int64_t num_tokens, std::int64_t memory_tokens = 0,
                       std::int64_t past_tokens = 0) const;
  // The unit of the final norm's parameters, if there is one, and of those added before the next
  // unit begins.
  int last_unit() const { return last_unit_; }
  std::vector<Figure> figures() const;
  std::vector<std::string> warnings() const;

 private:
  // Error(kInternal) if this stack does not read such a memory.
  void check_memory(const Memory& memory, std::int64_t batch) const;
  at::Tensor run_layers(const at::Tensor& x_BTC, const SequenceContext& context,
                        const std::optional<NoiseKey>& noise, NamedSums& sums, Past* past) const;
  ResidualStream forward_recomputed(const TransformerLayer& layer, const ResidualStream& stream,
                                    const SequenceContext& context,
                                    const std::optional<NoiseKey>& noise, NamedSums& sums) const;
  at::Tensor last_normed(const ResidualStream& stream) const;

  const Parameters& parameters_;
  StackRole role_;
  bool recompute_;
  std::vector<TransformerLayer> layers_;
  int last_unit_ = 0;
  std::optional<LayerNorm> final_norm_;  // none with post-norm layers
};

}  // namespace birkhoff
