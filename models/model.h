// What the runtime knows of a model: its parameters, the loss of a batch, and how to generate.
//
// Legend: B batch, T tokens, V vocabulary.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cluster/base/collectives/group.h"
#include "cluster/base/random/philox.h"
#include "cluster/base/tensors/parameters.h"
#include "data/batch/batch.h"
#include "models/losses/objective.h"

namespace birkhoff::configs {
class Config;
}

namespace birkhoff {

// Caches of one generation run.
class DecodeCache {
 public:
  virtual ~DecodeCache() = default;
};

class Model {
 public:
  virtual ~Model() = default;

  virtual Parameters& parameters() = 0;

  // One micro-batch. noise absent: evaluation.
  virtual ObjectiveSums objective(const Batch& batch, const std::optional<NoiseKey>& noise) = 0;

  // Language models: logits [B, T, V] of all positions.
  virtual at::Tensor logits(const Batch& batch, const std::optional<NoiseKey>& noise) = 0;

  // Incremental decoding: caches for `batch` sequences, then one token [B] (int64) a call gives the
  // next logits [B, V].
  virtual std::unique_ptr<DecodeCache> decode_cache(std::int64_t batch) = 0;
  virtual at::Tensor decode_step(DecodeCache& cache, const at::Tensor& tokens_B) = 0;
  // Most tokens that can be decoded into one cache.
  virtual std::int64_t max_tokens() const = 0;

  // Forward FLOPs of one sequence (multiply-add = 2); a training step costs three times that.
  virtual double forward_flops_per_sequence() const = 0;
  // Warnings a user must see at start, for instance that a mechanism leaks.
  virtual std::vector<std::string> warnings() const = 0;
};

// Builds the model of a resolved configuration, on the device of the data group. vocabulary: ids of
// the corpus' tokenizer. Bad values: Error(kConfig).
std::unique_ptr<Model> make_model(const configs::Config& config, std::int64_t vocabulary,
                                  const ParallelGroups& groups);

}  // namespace birkhoff
