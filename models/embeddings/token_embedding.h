// Embeddings of tokens and of their positions, the input of a stack of layers.
//
// Legend: B batch, T tokens, C channels, E columns of the embedding table, V vocabulary.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "cluster/base/random/philox.h"
#include "data/batch/batch.h"
#include "models/transformer/layers.h"
#include "models/transformer/transformer_layer.h"

namespace birkhoff::configs {
class Config;
}

namespace birkhoff {

// Returns an fp64 table [T, C] of sinusoidal positions (Vaswani et al. 2017, section 3.5) in T2T's
// layout: column i < C/2 is sin(t / s_i) and column C/2 + i is cos(t / s_i), with wavelengths s_i
// geometric from 1 to 10,000. The last column of an odd C is 0.
at::Tensor sinusoid_table(std::int64_t positions, std::int64_t channels);

class TokenEmbedding {
 public:
  // config must be resolved. `parameters` must outlive it; names begin with stack_prefix(role).
  TokenEmbedding(const configs::Config& config, StackRole role, std::int64_t vocabulary,
                 Parameters& parameters);

  // [B, T, C] or a slice of it, in the dtype of the parameters, for the tokens in field::kInputs
  // and, if the batch has them, their positions. With noise: after dropout. Error(kData) if T is
  // above data.sequence_length. This function and the next are collective over the tensor axis, as
  // are their backward passes.
  at::Tensor operator()(const Batch& batch, const TokenSlices& tokens,
                        const std::optional<NoiseKey>& noise) const;
  // The same for int64 tokens at int64 positions, without dropout. Undefined positions are
  // 0, 1, 2, ...
  at::Tensor embed(const at::Tensor& tokens_BT, const at::Tensor& positions_BT,
                   const TokenSlices& tokens) const;

  // The unit of its parameters (Parameters::begin_unit).
  int unit() const { return unit_; }
  // This rank's rows of the table [V, E], where E is embedding_width() of the model.
  const at::Tensor& weight_VE() const { return weight_VE_; }
  // Forward FLOPs of one token.
  double flops() const { return up_ ? up_->flops() : 0; }

 private:
  // The sum over the ranks of the tensor axis is the tokens' rows of the table.
  at::Tensor rows_of_part(const at::Tensor& tokens_BT) const;

  const Parameters& parameters_;
  int unit_;
  StackRole role_;
  std::int64_t num_ids_;
  Interval vocabulary_;  // this rank's ids
  std::int64_t sequence_length_;
  double scale_;
  float dropout_;
  // No positions: undefined. E is C unless the embedding is factorized.
  at::Tensor weight_VE_, positions_TC_;
  std::optional<Linear> up_;  // from E to C
};

// The slices of a batch's tokens over the ranks that hold the model.
TokenSlices token_slices(const Batch& batch, const Parameters& parameters);
// These, and what the batch says about its sequences: documents and lengths.
SequenceContext token_context(const Batch& batch, const TokenSlices& tokens);

}  // namespace birkhoff
