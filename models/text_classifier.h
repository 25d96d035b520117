// A text classifier: token embeddings, a stack whose tokens see each other in both directions,
// pooling, and an output layer with one row per class.
//
// Legend: B batch, T tokens, C channels, K classes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "configs/schema/config.pb.h"
#include "models/classifier.h"
#include "models/embeddings/token_embedding.h"
#include "models/model.h"
#include "models/transformer/stack.h"

namespace birkhoff {

class TextClassifier final : public Model, public Classifier {
 public:
  // config must be resolved. Errors as of Stack.
  TextClassifier(const configs::Config& config, std::int64_t vocabulary,
                 const ModelPlacement& place);

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
  // One vector [B, C] per sequence: the mean or the maximum over its tokens, or its first token.
  // Tokens with equal maxima share the gradient evenly, as in PyTorch's amax.
  at::Tensor pool(const at::Tensor& x_BTC, const at::Tensor& lengths_B) const;

  Parameters parameters_;
  std::int64_t sequence_length_;
  TokenEmbedding embedding_;
  Stack stack_;
  configs::Classification::Pooling pooling_;
  Linear output_;
};

}  // namespace birkhoff
