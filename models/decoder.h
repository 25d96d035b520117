// A model that generates one token after another.
//
// Legend: B batch, V vocabulary.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "models/transformer/decode_cache.h"

namespace birkhoff {

class Decoder {
 public:
  virtual ~Decoder() = default;

  // Where tokens must be.
  virtual at::Device device() const = 0;
  // decode_cache() makes the caches for `batch` sequences; each decode_step() takes one token per
  // sequence, [B] (int64), and returns the next logits [B, V]. No gradients.
  virtual std::unique_ptr<DecodeCache> decode_cache(std::int64_t batch) = 0;
  virtual at::Tensor decode_step(DecodeCache& cache, const at::Tensor& tokens_B) = 0;
  // The maximum number of tokens that can be decoded into one cache.
  virtual std::int64_t max_tokens() const = 0;
};

}  // namespace birkhoff
