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
  // of the same vocabulary, whose tables this one reads instead of its own.
  TokenEmbedding(const configs::Config& config, StackRole role, std::int64_t vocabulary,
                 Parameters& parameters, const std::optional<ImageDims>& image = std::nullopt,
                 const TokenEmbedding* shared = nullptr);

  TokenSlices slices(const Batch& batch) const override;
  at::Tensor lengths(const Batch& batch) const override { return batch.at(field::kLengths); }
  // Of the tokens in field::kInputs and, if the batch has them, their positions. Error(kData) if T
  // is above longest_sequence() of the stack.
  at::Tensor operator()(const Batch& batch, const TokenSlices& tokens,
                        const std::optional<NoiseKey>& noise) const override;
  // The same for int64 tokens at int64 positions; noise only drops whole tokens. Undefined
  // positions are 0, 1, 2, ... Collective as operator().
  at::Tensor embed(const at::Tensor& tokens_BT, const at::Tensor& positions_BT,
                   const TokenSlices& tokens,
                   const std::optional<NoiseKey>& noise = std::nullopt) const;

  // The rows of a part of the ids (models/embeddings/vocabulary_parts.h).
  struct Table {
    Interval ids;              // the ids of the part that this rank holds
    at::Tensor weight_VE;      // their rows; E is the part's width
    std::optional<Linear> up;  // from E to C, if these differ
  };
  // One for each of embedding_parts().
  const std::vector<Table>& tables() const { return tables_; }
  // The unit of its tables (Parameters::begin_unit).
  int unit() const { return units_.back(); }
  double flops() const override;

 private:
  // Of the table, a row for each token, and zeros for tokens without one there. Without adaptive
  // softmax the sum over the ranks of the tensor axis is the tokens' rows.
  at::Tensor rows_of(const Table& table, const at::Tensor& tokens_BT) const;
  at::Tensor raised(const Table& table, const at::Tensor& x_BTE) const;  // to C channels

  const Parameters& parameters_;
  std::vector<int> units_;  // of its own parameters and, last, of the tables
  StackRole role_;
  std::int64_t num_ids_;
  std::int64_t sequence_length_;
  double scale_;
  float dropout_, token_dropout_;
  std::vector<Table> tables_;
  at::Tensor begin_E;  // of kBeginToken; undefined: there is none
  std::optional<Positions> positions_;
};

// The slices of the tokens in field::kInputs over the ranks that hold the model.
TokenSlices token_slices(const Batch& batch, const Parameters& parameters);
// Slices of tokens, and what the batch says about its sequences: documents and lengths.
SequenceContext token_context(const Batch& batch, const TokenSlices& tokens);

}  // namespace birkhoff
