// A classifier of sequences: an embedding of texts or images, a stack whose tokens see each other
// in both directions, pooling, and an output layer with one row per class.
//
// Legend: B batch, T tokens, C channels, K classes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "models/classifier.h"
#include "models/embeddings/sequence_embedding.h"
#include "models/model.h"
#include "models/pooling.h"
#include "models/transformer/stack.h"

namespace birkhoff {

class SequenceClassifier final : public Model, public Classifier {
 public:
  // Makes the embedding, whose parameters are the model's first.
  using MakeEmbedding = std::function<std::unique_ptr<SequenceEmbedding>(Parameters&)>;

  // config must be resolved. Errors as of Stack and of the embedding.
  SequenceClassifier(const configs::Config& config, const MakeEmbedding& make_embedding,
                     Pooling pooling, std::int64_t classes, const ModelPlacement& place);

  Parameters& parameters() override { return parameters_; }
  // Counts one target per sequence, to which mechanisms add the mean of their auxiliary losses over
  // its tokens. The sum "accuracy" is the number of sequences whose label is the likeliest class.
  LossSums loss_sums(const Batch& batch, const std::optional<NoiseKey>& noise) override;
  Classifier* classifier() override { return this; }
  at::Device device() const override { return parameters_.device(); }
  at::Tensor log_probabilities(const Batch& batch) override;
  std::int64_t max_tokens() const override { return sequence_length_; }
  double forward_flops_per_sequence() const override;
  std::vector<Figure> figures() const override;
  std::vector<std::string> warnings() const override { return stack_.warnings(); }

 private:
  // The logits [B, K], in the compute dtype.
  at::Tensor logits(const Batch& batch, const std::optional<NoiseKey>& noise,
                    NamedSums& sums) const;

  Parameters parameters_;
  std::int64_t sequence_length_;
  std::unique_ptr<SequenceEmbedding> embedding_;
  Stack stack_;
  Pooling pooling_;
  Linear output_;
};

}  // namespace birkhoff
