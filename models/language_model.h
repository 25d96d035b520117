// A decoder-only language model after T2T's lmx: token embeddings, a causal stack and an output
// layer.
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
#include "models/embeddings/token_embedding.h"
#include "models/model.h"
#include "models/token_scorer.h"
#include "models/transformer/layers.h"
#include "models/transformer/stack.h"

namespace birkhoff {

class LanguageModel final : public Model, public Decoder, public TokenScorer {
 public:
  // config must be resolved. Errors as of Stack. `image`: as of TokenEmbedding.
  LanguageModel(const configs::Config& config, std::int64_t vocabulary, const ModelPlacement& place,
                const std::optional<ImageDims>& image = std::nullopt);

  Parameters& parameters() override { return parameters_; }
  LossSums loss_sums(const Batch& batch, const std::optional<NoiseKey>& noise) override;
  at::Tensor logits(const Batch& batch, const std::optional<NoiseKey>& noise) override;
  Decoder* decoder() override { return this; }
  TokenScorer* token_scorer() override { return this; }
  at::Device device() const override { return parameters_.device(); }
  std::unique_ptr<DecodeCache> decode_cache(std::int64_t batch) override;
  at::Tensor decode_step(DecodeCache& cache, const at::Tensor& tokens_B) override;
  std::int64_t max_tokens() const override { return sequence_length_; }
  double forward_flops_per_sequence() const override;
  std::vector<Figure> figures() const override { return stack_.figures(); }
  std::vector<std::string> warnings() const override { return stack_.warnings(); }

 private:
  // The outputs [B, T, C] of the stack, or a slice.
  at::Tensor outputs(const Batch& batch, const TokenSlices& tokens,
                     const std::optional<NoiseKey>& noise, NamedSums& sums) const;
  // The logits of such outputs for this rank's ids, in the compute dtype.
  at::Tensor output_logits(const at::Tensor& x, const TokenSlices& tokens) const;
  // From this rank's logits: those of all ids in the parameters' dtype, and cross_entropy_sums().
  at::Tensor all_logits(const at::Tensor& logits_BTv) const;
  LossSums loss_of(const at::Tensor& logits_BTv, const at::Tensor& targets_BT,
                   const at::Tensor& mask_BT) const;
  // The loss of the stack's outputs. Without gradients, no more than 2^26 logits exist at a time.
  LossSums output_loss(const at::Tensor& x_BTC, const TokenSlices& tokens,
                       const at::Tensor& targets_BT, const at::Tensor& mask_BT) const;

  Parameters parameters_;
  std::int64_t vocabulary_, sequence_length_;
  TokenEmbedding embedding_;
  Stack stack_;
  std::optional<Linear> output_down_;  // from C to E, of a factorized embedding
  // This rank's rows; the embedding table itself if embeddings are tied.
  at::Tensor output_VE;
};

}  // namespace birkhoff
