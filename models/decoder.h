// Models that generate one token after another.
//
// Legend: B batch, S tokens of a source, V vocabulary.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "data/batch/batch.h"
#include "models/transformer/decode_cache.h"

namespace birkhoff {

class StepDecoder {
 public:
  virtual ~StepDecoder() = default;

  // Where tokens must be.
  virtual at::Device device() const = 0;
  // Takes one token per sequence of the cache, [B] (int64), and returns the next logits [B, V]. No
  // gradients. Collective over the tensor axis.
  virtual at::Tensor decode_step(DecodeCache& cache, const at::Tensor& tokens_B) = 0;
  // The maximum number of tokens that can be decoded into one cache.
  virtual std::int64_t max_tokens() const = 0;
};

// Continues sequences.
class Decoder : public StepDecoder {
 public:
  // The caches for `batch` sequences.
  virtual std::unique_ptr<DecodeCache> decode_cache(std::int64_t batch) = 0;
};

// Generates a target for each source.
class SourceDecoder : public StepDecoder {
 public:
  // The caches for the sources of a batch, which has inputs [B, S] and lengths [B]
  // (data/batch/batch.h). They are encoded once. The first token to decode is the one that precedes
  // targets in training, an end mark. No gradients. Collective over the tensor axis.
  virtual std::unique_ptr<DecodeCache> decode_cache(const Batch& sources) = 0;
  // The maximum number of tokens of a source.
  virtual std::int64_t max_source_tokens() const = 0;
};

}  // namespace birkhoff
