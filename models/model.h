// The model interface that the runtime uses: parameters, the loss of a batch, and figures.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cluster/base/random/philox.h"
#include "cluster/base/tensors/parameters.h"
#include "data/batch/batch.h"
#include "data/batch/image_dims.h"
#include "models/losses/loss_sums.h"

namespace birkhoff::configs {
class Config;
}

namespace birkhoff {

class Classifier;
class Decoder;
class SourceDecoder;
class TokenScorer;

// What a model reads and predicts, as far as the corpus determines it.
struct ModelInputs {
  std::int64_t vocabulary = 0;           // ids of the corpus tokenizer
  std::int64_t source_vocabulary = 0;    // of translation: ids of the sources' tokenizer
  std::vector<std::string> class_names;  // of the labels 0, 1, ...; empty: no labels
  std::optional<ImageDims> image{};      // of the samples, if they are images
};

class Model {
 public:
  virtual ~Model() = default;

  virtual Parameters& parameters() = 0;

  // The loss of one micro-batch. Without `noise`: evaluation.
  virtual LossSums loss_sums(const Batch& batch, const std::optional<NoiseKey>& noise) = 0;

  // The model as a generator of tokens; null if it is not one.
  virtual Decoder* decoder() { return nullptr; }
  // The model as a generator of targets from sources; null if it is not one.
  virtual SourceDecoder* source_decoder() { return nullptr; }
  // The model as a scorer of given tokens; null if it is not one.
  virtual TokenScorer* token_scorer() { return nullptr; }
  // The model as a classifier of sequences; null if it is not one.
  virtual Classifier* classifier() { return nullptr; }

  // What training carries from each sequence of a step to the sequence at the same position of the
  // next step's batch, in the parameters' dtype: layers, tokens (at most), channels. Empty:
  // nothing.
  virtual std::vector<std::int64_t> past_shape() const { return {}; }

  // Forward FLOPs of one sequence (a multiply-add is 2). A training step costs three times that.
  virtual double forward_flops_per_sequence() const = 0;
  // Figures of a batch in addition to its loss. Every LossSums has the sums that they name.
  virtual std::vector<Figure> figures() const { return {}; }
  // Warnings that the user must see at start-up, for example that a mechanism leaks.
  virtual std::vector<std::string> warnings() const = 0;
};

}  // namespace birkhoff
