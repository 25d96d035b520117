// A decoder-only language model after T2T's lmx: a causal Transformer and an output layer.
//
// Legend: B batch, T tokens, C channels, E columns of the embedding table, V vocabulary.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "models/decoder.h"
#include "models/model.h"
#include "models/transformer.h"
#include "models/transformer/layers.h"

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
  std::int64_t max_tokens() const override { return transformer_.sequence_length(); }
  double forward_flops_per_sequence() const override;
  std::vector<Figure> figures() const override { return transformer_.figures(); }
  std::vector<std::string> warnings() const override { return transformer_.warnings(); }

 private:
  // The logits of the Transformer's outputs, in the compute dtype.
  at::Tensor output_logits(const at::Tensor& x) const;
  // cross_entropy_sums() of the logits. Without gradients, no more than 2^26 logits exist at a
  // time.
  LossSums output_loss(const at::Tensor& x_BTC, const at::Tensor& targets_BT,
                       const at::Tensor& mask_BT) const;

  Parameters parameters_;
  Transformer transformer_;
  std::optional<Linear> output_down_;  // from C to E, of a factorised embedding
  at::Tensor output_VE;                // the embedding table itself if embeddings are tied
};

}  // namespace birkhoff
