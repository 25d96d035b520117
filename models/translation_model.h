// An encoder-decoder Transformer (Vaswani et al. 2017, "Attention Is All You Need", section 3): an
// encoder of sources, and a causal decoder of targets whose layers also read the encoder's outputs.
//
// Legend: B batch, S tokens of a source, T tokens of a target, C channels, V vocabulary of targets.
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
#include "models/output_layer.h"
#include "models/token_scorer.h"
#include "models/transformer/stack.h"

namespace birkhoff {

class TranslationModel final : public Model, public SourceDecoder, public TokenScorer {
 public:
  // config must be resolved. The vocabularies are numbers of ids. label_smoothing: of the loss in
  // training (models/losses/fused_cross_entropy.h). Errors as of Stack, and Error(kConfig) if
  // model.encoder.share_embedding is set and the vocabularies differ.
  TranslationModel(const configs::Config& config, std::int64_t source_vocabulary,
                   std::int64_t target_vocabulary, double label_smoothing,
                   const ModelPlacement& place);

  Parameters& parameters() override { return parameters_; }
  // The sum "accuracy" is the number of targets that have the largest logit, of equal ones the
  // smallest id; "accuracy_per_sequence" is the number of pairs of which all targets have, and
  // "sequences" that of all pairs with targets. Mechanisms of the encoder add the mean of their
  // auxiliary losses over the tokens of a source for each of its targets.
  LossSums loss_sums(const Batch& batch, const std::optional<NoiseKey>& noise) override;
  // The logits [B, T, V] of all targets, each from those before it. Those of padding have no
  // meaning.
  at::Tensor logits(const Batch& batch, const std::optional<NoiseKey>& noise) override;

  SourceDecoder* source_decoder() override { return this; }
  TokenScorer* token_scorer() override { return this; }
  at::Device device() const override { return parameters_.device(); }
  std::unique_ptr<DecodeCache> decode_cache(const Batch& sources) override;
  at::Tensor decode_step(DecodeCache& cache, const at::Tensor& tokens_B) override;
  std::int64_t max_tokens() const override { return target_length_; }
  std::int64_t max_source_tokens() const override { return source_length_; }

  double forward_flops_per_sequence() const override;
  std::vector<Figure> figures() const override;
  std::vector<std::string> warnings() const override;

 private:
  // The outputs of both stacks.
  struct Outputs {
    at::Tensor x_BTC;                      // of the decoder, or a slice
    TokenSlices tokens;                    // of the targets
    NamedSums encoder_sums, decoder_sums;  // of the layers
  };
  Outputs outputs(const Batch& batch, const std::optional<NoiseKey>& noise) const;
  Memory encode(const Batch& sources, const std::optional<NoiseKey>& noise, NamedSums& sums) const;

  Parameters parameters_;
  double label_smoothing_;
  std::int64_t source_length_, target_length_;
  TokenEmbedding source_embedding_;
  Stack encoder_;
  TokenEmbedding target_embedding_;
  Stack decoder_;
  OutputLayer output_;
};

}  // namespace birkhoff
