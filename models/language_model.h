// A decoder-only language model after T2T's lmx: embeddings and positions, pre-norm layers, final
// norm, output layer.
//
// Legend: B batch, T tokens, C channels, V vocabulary.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "models/decoder.h"
#include "models/model.h"
#include "models/transformer/layers.h"
#include "models/transformer/transformer_layer.h"

namespace birkhoff {

class LanguageModel final : public Model, public Decoder {
 public:
  // config must be resolved. Its values are checked here: Error(kConfig).
  LanguageModel(const configs::Config& config, std::int64_t vocabulary,
                const ParallelGroups& parallel);

  Parameters& parameters() override { return parameters_; }
  LossSums loss_sums(const Batch& batch, const std::optional<NoiseKey>& noise) override;
  // The logits [B, T, V] of all positions.
  at::Tensor logits(const Batch& batch, const std::optional<NoiseKey>& noise);
  Decoder* decoder() override { return this; }
  at::Device device() const override { return parameters_.device(); }
  std::unique_ptr<DecodeCache> decode_cache(std::int64_t batch) override;
  at::Tensor decode_step(DecodeCache& cache, const at::Tensor& tokens_B) override;
  std::int64_t max_tokens() const override { return sequence_length_; }
  double forward_flops_per_sequence() const override;
  std::vector<Figure> figures() const override;
  std::vector<std::string> warnings() const override;

 private:
  at::Tensor forward(const Batch& batch, const std::optional<NoiseKey>& noise,
                     NamedSums& sums) const;
  ResidualStream forward_recomputed(const TransformerLayer& layer, const ResidualStream& stream,
                                    const SequenceContext& context,
                                    const std::optional<NoiseKey>& noise, NamedSums& sums) const;
  // Token embeddings, plus position embeddings if the model has any. Undefined positions_BT means
  // 0, 1, 2, ...
  at::Tensor embed(const at::Tensor& tokens_BT, const at::Tensor& positions_BT) const;
  // The logits, in the compute dtype.
  at::Tensor output_logits(const ResidualStream& stream) const;

  Parameters parameters_;
  std::int64_t sequence_length_, vocabulary_;
  double embedding_scale_;
  float embedding_dropout_;
  bool recompute_;
  at::Tensor embedding_VC, positions_TC;  // positions_TC is undefined without positions
  std::vector<TransformerLayer> layers_;
  std::optional<LayerNorm> final_norm_;
  at::Tensor output_VC;  // embedding_VC itself if embeddings are tied
};

}  // namespace birkhoff
