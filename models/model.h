// The model interface that the runtime uses: parameters, the loss of a batch, and generation.
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

#include "cluster/base/collectives/process_group.h"
#include "cluster/base/random/philox.h"
#include "cluster/base/tensors/parameters.h"
#include "data/batch/batch.h"
#include "models/losses/loss_sums.h"

namespace birkhoff::configs {
class Config;
}

namespace birkhoff {

// The caches of one generation run.
class DecodeCache {
 public:
  virtual ~DecodeCache() = default;
};

class Model {
 public:
  virtual ~Model() = default;

  virtual Parameters& parameters() = 0;

  // The loss of one micro-batch. Without `noise`: evaluation.
  virtual LossSums loss_sums(const Batch& batch, const std::optional<NoiseKey>& noise) = 0;

  // Language models only: the logits [B, T, V] of all positions.
  virtual at::Tensor logits(const Batch& batch, const std::optional<NoiseKey>& noise) = 0;

  // Incremental decoding. decode_cache() makes the caches for `batch` sequences; each decode_step()
  // takes one token per sequence, [B] (int64), and returns the next logits [B, V].
  virtual std::unique_ptr<DecodeCache> decode_cache(std::int64_t batch) = 0;
  virtual at::Tensor decode_step(DecodeCache& cache, const at::Tensor& tokens_B) = 0;
  // The maximum number of tokens that can be decoded into one cache.
  virtual std::int64_t max_tokens() const = 0;

  // Forward FLOPs of one sequence (a multiply-add is 2). A training step costs three times that.
  virtual double forward_flops_per_sequence() const = 0;
  // Warnings that the user must see at start-up, for example that a mechanism leaks.
  virtual std::vector<std::string> warnings() const = 0;
};

// Builds the model of a resolved configuration on the device of the data group. vocabulary: the
// number of ids of the corpus tokenizer. Invalid values: Error(kConfig).
std::unique_ptr<Model> make_model(const configs::Config& config, std::int64_t vocabulary,
                                  const ParallelGroups& parallel);

}  // namespace birkhoff
