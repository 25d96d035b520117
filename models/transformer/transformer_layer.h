// One pre-norm Transformer layer: x += attention(norm(x)); x += feed_forward(norm(x)).
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

namespace birkhoff {

// A layer keeps no state between calls: the result of forward() depends only on its arguments and
// the parameters, so forward() may be called again to recompute.
class TransformerLayer {
 public:
  // `number` counts layers from 0. It selects the attention entry (number modulo entries) and the
  // noise. Error(kConfig).
  TransformerLayer(const configs::Model& config, std::int64_t number, std::int64_t sequence_length,
                   bool causal, Parameters& parameters, const ParallelGroups& parallel);

  // Returns the feed-forward output as `branch`, for the next norm to add.
  ResidualStream forward(const ResidualStream& stream, const SequenceContext& context,
                         const std::optional<NoiseKey>& noise, NamedSums& sums) const;

  std::vector<std::unique_ptr<DecodeState>> decode_state(std::int64_t batch) const;
  ResidualStream decode_step(std::vector<std::unique_ptr<DecodeState>>& states,
                             const ResidualStream& stream, const SequenceContext& context) const;

  double forward_flops(std::int64_t num_tokens) const;
  std::vector<Figure> figures() const { return attention_.figures(); }
  std::vector<std::string> warnings() const { return attention_.warnings(); }

 private:
  std::int64_t number_;
  float dropout_;
  LayerNorm attention_norm_;
  MultiHeadAttention attention_;
  LayerNorm feed_forward_norm_;
  FeedForward feed_forward_;
};

}  // namespace birkhoff
