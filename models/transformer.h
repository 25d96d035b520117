// Token embeddings, positions, pre-norm layers and the final norm: what all models of token
// sequences have in common. After T2T's lmx.
//
// Legend: B batch, T tokens, C channels, V vocabulary.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "data/batch/batch.h"
#include "models/decoder.h"
#include "models/transformer/layers.h"
#include "models/transformer/transformer_layer.h"

namespace birkhoff::configs {
class Config;
}

namespace birkhoff {

// Where the parameters of a model live, and their dtypes (train.precision).
Parameters make_parameters(const configs::Config& config, const ParallelGroups& parallel);

class Transformer {
 public:
  // config must be resolved. Its values are checked here, before any parameter is made:
  // Error(kConfig). `parameters` must outlive it; those of a kSourceEncoder are named "encoder.*".
  Transformer(const configs::Config& config, StackRole role, std::int64_t vocabulary,
              Parameters& parameters, const ParallelGroups& parallel);

  // The outputs [B, T, C] of the final norm, in the compute dtype, for the tokens in field::kInputs
  // and, where the batch has them, its segments, positions and lengths. Outputs of padding have no
  // meaning. Appends the layers' sums. Error(kData) if T is above data.sequence_length.
  // `memory`: of a kTargetDecoder only.
  at::Tensor forward(const Batch& batch, const std::optional<NoiseKey>& noise, NamedSums& sums,
                     const Memory& memory = {}) const;
  // The outputs of a kSourceEncoder, for a kTargetDecoder. The batch has no segments.
  Memory encode(const Batch& batch, const std::optional<NoiseKey>& noise, NamedSums& sums) const;

  // As in models/decoder.h; a step returns the outputs [B, 1, C]. `memory` as in forward().
  std::unique_ptr<DecodeCache> decode_cache(std::int64_t batch, const Memory& memory = {}) const;
  at::Tensor decode_step(DecodeCache& cache, const at::Tensor& tokens_B) const;

  std::int64_t sequence_length() const { return sequence_length_; }
  // [V, E], where E is embedding_width() of the model.
  const at::Tensor& embedding_VE() const { return embedding_; }
  // Of one sequence of data.sequence_length tokens; a memory has as many.
  double forward_flops() const;
  std::vector<Figure> figures() const;
  std::vector<std::string> warnings() const;

 private:
  // What the batch says about its tokens, with the positions that it leaves out.
  SequenceContext context_of(const Batch& batch) const;
  // Error(kInternal) if this stack does not read such a memory.
  void check_memory(const Memory& memory, std::int64_t batch) const;
  at::Tensor run_layers(const Batch& batch, const SequenceContext& context,
                        const std::optional<NoiseKey>& noise, NamedSums& sums) const;
  // Undefined positions_BT means 0, 1, 2, ...
  at::Tensor embed(const at::Tensor& tokens_BT, const at::Tensor& positions_BT) const;
  ResidualStream forward_recomputed(const TransformerLayer& layer, const ResidualStream& stream,
                                    const SequenceContext& context,
                                    const std::optional<NoiseKey>& noise, NamedSums& sums) const;
  at::Tensor normed(const ResidualStream& stream) const;

  const Parameters& parameters_;
  StackRole role_;
  std::int64_t sequence_length_;
  double embedding_scale_;
  float embedding_dropout_;
  bool recompute_;
  // [V, E], [T, C]; no positions: undefined. E is C unless the embedding is factorised.
  at::Tensor embedding_, positions_;
  std::optional<Linear> embedding_up_;  // from E to C; of a factorised embedding
  std::vector<TransformerLayer> layers_;
  std::optional<LayerNorm> final_norm_;
};

}  // namespace birkhoff
