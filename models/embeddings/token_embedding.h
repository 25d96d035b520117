// Embeddings of tokens and of their positions, the input of a stack of layers.
//
// Legend: B batch, T tokens, C channels, E columns of the embedding table, V vocabulary.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "cluster/base/random/philox.h"
#include "data/batch/batch.h"
#include "models/embeddings/positions.h"
#include "models/embeddings/sequence_embedding.h"
#include "models/transformer/layers.h"
#include "models/transformer/transformer_layer.h"

namespace birkhoff::configs {
class Config;
}

namespace birkhoff {

// The token before the first value of an image. It has a vector of its own, and is never predicted.
inline constexpr std::int64_t kBeginToken = -1;

class TokenEmbedding final : public SequenceEmbedding {
 public:
  // config must be resolved. `parameters` must outlive it; names begin with stack_prefix(role).
  // `image`: tokens are the values of images of this shape, and kBeginToken. `shared`: an embedding
  // of the same vocabulary, whose table this one reads instead of a table of its own.
  TokenEmbedding(const configs::Config& config, StackRole role, std::int64_t vocabulary,
                 Parameters& parameters, const std::optional<ImageDims>& image = std::nullopt,
                 const TokenEmbedding* shared = nullptr);

  TokenSlices slices(const Batch& batch) const override;
  at::Tensor lengths(const Batch& batch) const override { return batch.at(field::kLengths); }
  // Of the tokens in field::kInputs and, if the batch has them, their positions. Error(kData) if T
  // is above longest_sequence() of the stack.
  at::Tensor operator()(const Batch& batch, const TokenSlices& tokens,
                        const std::optional<NoiseKey>& noise) const override;
  // The same for int64 tokens at int64 positions, without dropout. Undefined positions are
  // 0, 1, 2, ... Collective as operator().
  at::Tensor embed(const at::Tensor& tokens_BT, const at::Tensor& positions_BT,
                   const TokenSlices& tokens) const;

  // The unit of its table (Parameters::begin_unit).
  int unit() const { return units_.back(); }
  // This rank's rows of the table [V, E], where E is embedding_width() of the model.
  const at::Tensor& weight_VE() const { return weight_VE_; }
  double flops() const override { return up_ ? up_->flops() : 0; }

 private:
  // The sum over the ranks of the tensor axis is the tokens' rows of the table.
  at::Tensor rows_of_part(const at::Tensor& tokens_BT) const;

  const Parameters& parameters_;
  std::vector<int> units_;  // of its own parameters and, last, of the table
  StackRole role_;
  std::int64_t num_ids_;
  Interval vocabulary_;  // this rank's ids
  std::int64_t sequence_length_;
  double scale_;
  float dropout_;
  // E is C unless the embedding is factorized. begin_E: of kBeginToken; undefined: there is none.
  at::Tensor weight_VE_, begin_E;
  std::optional<Linear> up_;  // from E to C
  std::optional<Positions> positions_;
};

// The slices of the tokens in field::kInputs over the ranks that hold the model.
TokenSlices token_slices(const Batch& batch, const Parameters& parameters);
// Slices of tokens, and what the batch says about its sequences: documents and lengths.
SequenceContext token_context(const Batch& batch, const TokenSlices& tokens);

}  // namespace birkhoff
