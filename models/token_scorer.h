// A model that predicts each target of a batch from what comes before it.
//
// Legend: B batch, T tokens, V vocabulary.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "cluster/base/random/philox.h"
#include "data/batch/batch.h"

namespace birkhoff {

class TokenScorer {
 public:
  virtual ~TokenScorer() = default;

  // Where a batch must be.
  virtual at::Device device() const = 0;
  // The logits [B, T, V] of the targets of a batch, in the parameters' dtype. The batch has the
  // fields that the model trains on (data/batch/batch.h), except targets and, without a source,
  // mask. Without `noise`: evaluation. Collective over the tensor axis.
  virtual at::Tensor logits(const Batch& batch, const std::optional<NoiseKey>& noise) = 0;
  // The maximum number of tokens of a sequence.
  virtual std::int64_t max_tokens() const = 0;
};

}  // namespace birkhoff
