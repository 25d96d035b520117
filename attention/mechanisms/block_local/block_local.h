// Softmax attention within contiguous blocks of tokens, optionally including neighboring blocks
// ("Local Attention" of Tay et al. 2020).
#pragma once

#include "attention/kernels/block_attention/block_attention.h"
#include "attention/logit_terms.h"
#include "attention/mechanism.h"

namespace birkhoff::configs {
class BlockLocalAttention;
}

namespace birkhoff {

class BlockLocalAttention : public Mechanism {
 public:
  BlockLocalAttention(const configs::BlockLocalAttention& config, const MechanismShape& shape,
                      const LogitTerms& terms);

  AttentionOutput attend(const AttentionInput& in, Path limit) const override;
  MechanismTraits traits() const override;
  at::Tensor visible_keys(std::int64_t num_queries, std::int64_t num_keys) const override;
  double forward_flops(std::int64_t num_tokens) const override;
  std::unique_ptr<DecodeState> decode_state(std::int64_t batch) const override;
  at::Tensor decode_step(DecodeState& state, const AttentionInput& in) const override;

 private:
  MechanismShape shape_;
  std::int64_t block_;
  std::int64_t look_back_;  // previous blocks visible, and following ones if not causal
  float dropout_;
  LogitTerms terms_;
};

}  // namespace birkhoff
