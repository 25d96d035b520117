// A classifier of sequences: an embedding of texts or images, a stack whose tokens see each other
// in both directions, pooling, and an output layer with one row per class.
//
// A sample may also be two sequences, which the same stack reads by themselves. The output layer
// then reads [a, b, |a - b|, a b] of their pooled vectors a and b (Conneau et al. 2017, "Supervised
// Learning of Universal Sentence Representations", section 3.1).
//
// Legend: B batch, S = 1 or 2 sequences of a sample, T tokens, C channels, K classes.
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

  // config must be resolved. sequences: S. Errors as of Stack and of the embedding.
  SequenceClassifier(const configs::Config& config, const MakeEmbedding& make_embedding,
                     Pooling pooling, std::int64_t classes, const ModelPlacement& place,
                     std::int64_t sequences = 1);

  Parameters& parameters() override { return parameters_; }
  // Counts one target per sample, to which mechanisms add the mean of their auxiliary losses over
  // its tokens; in training it has the weight of its class. The sum "accuracy" is the number of
  // samples whose label is the likeliest class.
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
  std::int64_t sequence_length_, sequences_;
  std::unique_ptr<SequenceEmbedding> embedding_;
  Stack stack_;
  Pooling pooling_;
  Linear output_;
  at::Tensor class_weight_K_;  // undefined: all are 1
};

}  // namespace birkhoff
