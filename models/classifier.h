// A model that assigns a class to each sequence.
//
// Legend: B batch, K classes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "data/batch/batch.h"

namespace birkhoff {

class Classifier {
 public:
  virtual ~Classifier() = default;

  // Where a batch must be.
  virtual at::Device device() const = 0;
  // The log-probabilities [B, K] of the classes, in the parameters' dtype. The batch has inputs and
  // lengths (data/batch/batch.h). No gradients. Error(kData) if its samples are single texts and
  // the model reads two.
  virtual at::Tensor log_probabilities(const Batch& batch) = 0;
  // The maximum number of tokens of a sequence.
  virtual std::int64_t max_tokens() const = 0;
};

}  // namespace birkhoff
