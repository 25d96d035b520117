// Mixture of Block Attention (Lu et al. 2025, "MoBA: Mixture of Block Attention for Long-Context
// LLMs", section 2.2): one softmax over the keys of a query's own block and of the blocks whose
// mean keys have the largest products with the query. A block whose last token is missing is never
// chosen, so the causal choice is exact, and decoding gives the same. The choice has no gradient.
//
// With grouped queries, choices belong to key heads: the mean of a group's queries chooses.
#pragma once

#include "attention/kernels/block_top_k/block_top_k.h"
#include "attention/logit_terms.h"
#include "attention/mechanism.h"

namespace birkhoff::configs {
class MixtureOfBlockAttention;
}

namespace birkhoff {

class MixtureOfBlockAttention : public Mechanism {
 public:
  MixtureOfBlockAttention(const configs::MixtureOfBlockAttention& config,
                          const MechanismShape& shape, const LogitTerms& terms);

  AttentionOutput attend(const AttentionInput& in, Path limit) const override;
  MechanismTraits traits() const override;
  at::Tensor visible_keys(std::int64_t num_queries, std::int64_t num_keys) const override;
  double forward_flops(std::int64_t num_tokens) const override;
  std::unique_ptr<DecodeState> decode_state(std::int64_t batch) const override;
  at::Tensor decode_step(DecodeState& state, const AttentionInput& in) const override;

 private:
  MechanismShape shape_;
  std::int64_t block_, others_;
  float dropout_;
  LogitTerms terms_;
};

}  // namespace birkhoff
