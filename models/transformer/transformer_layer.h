// One Transformer layer (Vaswani et al. 2017, section 3.1): attention, in a decoder of two stacks
// cross-attention, and feed-forward unless model.attention_only. With model.norm: pre each sublayer
// f does x += f(norm(x)); with post, x = norm(x + f(x)).
//
// Legend: B batch, T tokens, C channels.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "models/transformer/multi_head_attention.h"

namespace birkhoff::configs {
class Config;
}

namespace birkhoff {

// One of a model's stacks of layers.
enum class StackRole {
  kDecoder,        // the only stack; causal
  kEncoder,        // the only stack; tokens see each other in both directions
  kSourceEncoder,  // model.encoder: as kEncoder; a kTargetDecoder reads its outputs
  kTargetDecoder,  // causal, with cross-attention in each layer
};

// What the names of the stack's parameters begin with, and its fields in `model`: "encoder." or "".
std::string stack_prefix(StackRole role);
// The tokens of the longest sequence that the stack takes, with those of model.memory. config must
// be resolved.
std::int64_t longest_sequence(const configs::Config& config, StackRole role);

struct AttentionSublayer {
  LayerNorm norm;  // before the attention, or after it and the addition (model.norm)
  MultiHeadAttention attention;
  std::int64_t noise_number;
};

// A layer keeps no state between calls: the result of forward() depends only on its arguments and
// the parameters, so forward() may be called again to recompute.
class TransformerLayer {
 public:
  // `config` describes the stack (stack_model() in stack.cpp). `number` counts its
  // layers from 0; it selects the attention entry (number modulo entries) and the noise.
  // Sequences and memories have at most that many tokens. Error(kConfig).
  TransformerLayer(const configs::Model& config, StackRole role, std::int64_t number,
                   std::int64_t sequence_length, std::int64_t memory_length,
                   Parameters& parameters);

  // With model.norm: pre, returns the last sublayer's output as `branch`, for the next norm to add.
  ResidualStream forward(const ResidualStream& stream, const SequenceContext& context,
                         const std::optional<NoiseKey>& noise, NamedSums& sums) const;

  struct State {
    std::vector<std::unique_ptr<DecodeState>> attention, cross_attention;  // by head group
  };
  State decode_state(std::int64_t batch, const Memory& memory) const;
  ResidualStream decode_step(State& state, const ResidualStream& stream,
                             const SequenceContext& context) const;

  double forward_flops(std::int64_t num_tokens, std::int64_t memory_tokens,
                       std::int64_t past_tokens) const;
  // Its self-attention, then its cross-attention if it has one.
  std::vector<const MultiHeadAttention*> attentions() const;

 private:
  // The stream after a sublayer. f(x_BTC): its output, in which dropout was done.
  template <typename Sublayer>
  ResidualStream after(const LayerNorm& norm, const ResidualStream& before,
                       const Sublayer& f) const;

  const Parameters& parameters_;
  int unit_;  // Parameters::begin_unit()
  bool post_norm_;
  float dropout_;
  // In the order in which the forward pass uses them: gradient buckets fill from the end.
  AttentionSublayer attention_;
  std::optional<AttentionSublayer> cross_attention_;  // of a kTargetDecoder
  std::optional<LayerNorm> feed_forward_norm_;        // both or none: model.attention_only
  std::optional<FeedForward> feed_forward_;
};

}  // namespace birkhoff
