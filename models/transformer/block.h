// One pre-norm Transformer block: x += attention(norm(x)); x += feed_forward(norm(x)).
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

// A block keeps no state between calls: what forward() gives depends on its arguments and
// parameters alone, so it may be called again to recompute.
class Block {
 public:
  // `number` from 0; chooses the attention entry (number modulo entries) and the noise.
  // Error(kConfig).
  Block(const configs::Model& config, std::int64_t number, std::int64_t sequence_length,
        Parameters& parameters, const ParallelGroups& groups);

  // What the feed-forward layer gives is left to the next norm to add.
  ResidualStream forward(const ResidualStream& stream, const SequenceContext& context,
                         const std::optional<NoiseKey>& noise, NamedSums& sums) const;

  std::vector<std::unique_ptr<DecodeState>> decode_state(std::int64_t batch) const;
  ResidualStream decode_step(std::vector<std::unique_ptr<DecodeState>>& states,
                             const ResidualStream& stream, const SequenceContext& context) const;

  double forward_flops(std::int64_t num_tokens) const;
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
