// A decoder-only language model after T2T's lmx: token embeddings, a causal stack and an output
// layer.
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
#include "models/embeddings/token_embedding.h"
#include "models/model.h"
#include "models/output_layer.h"
#include "models/token_scorer.h"
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
  std::int64_t max_tokens() const override { return longest_sequence_; }
  std::vector<std::int64_t> past_shape() const override { return past_shape_; }
  double forward_flops_per_sequence() const override;
  std::vector<Figure> figures() const override { return stack_.figures(); }
  std::vector<std::string> warnings() const override { return stack_.warnings(); }

 private:
  // The outputs [B, T, C] of the stack, or a slice.
  at::Tensor outputs(const Batch& batch, const TokenSlices& tokens,
                     const std::optional<NoiseKey>& noise, NamedSums& sums,
                     Past* past = nullptr) const;

  Parameters parameters_;
  std::int64_t sequence_length_;
  std::int64_t longest_sequence_;         // with the memory
  std::vector<std::int64_t> past_shape_;  // empty: no memory
  std::int64_t evaluation_memory_;
  TokenEmbedding embedding_;
  Stack stack_;
  OutputLayer output_;
};

}  // namespace birkhoff
