// The input of a stack of layers: turns the samples of a batch into sequences of vectors.
//
// Legend: B batch, T tokens, C channels.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "cluster/base/random/philox.h"
#include "data/batch/batch.h"
#include "models/parallel/token_slices.h"

namespace birkhoff {

class SequenceEmbedding {
 public:
  virtual ~SequenceEmbedding() = default;

  // The slices of a batch's tokens over the ranks that hold the model.
  virtual TokenSlices slices(const Batch& batch) const = 0;
  // The tokens of each sequence, without padding: int64 [B], on the device of the batch.
  virtual at::Tensor lengths(const Batch& batch) const = 0;
  // [B, T, C] or a slice of it, in the dtype of the parameters. With noise: after dropout.
  // Collective over the tensor axis, as is its backward pass. Error(kData) if the batch does not
  // fit the model.
  virtual at::Tensor operator()(const Batch& batch, const TokenSlices& tokens,
                                const std::optional<NoiseKey>& noise) const = 0;
  // Forward FLOPs of one token.
  virtual double flops() const = 0;
};

}  // namespace birkhoff
