// Softmax attention to the nearest tokens: a query sees the `width` last tokens, its own included;
// in an encoder also the width - 1 tokens after it (Beltagy et al. 2020, "Longformer", section 3.1;
// Child et al. 2019, "Generating Long Sequences with Sparse Transformers", section 4.2).
#pragma once

#include "attention/logit_terms.h"
#include "attention/mechanism.h"

namespace birkhoff::configs {
class SlidingWindowAttention;
}

namespace birkhoff {

class SlidingWindowAttention : public Mechanism {
 public:
  SlidingWindowAttention(const configs::SlidingWindowAttention& config, const MechanismShape& shape,
                         const LogitTerms& terms);

  AttentionOutput attend(const AttentionInput& in, Path limit) const override;
  MechanismTraits traits() const override;
  at::Tensor visible_keys(std::int64_t num_queries, std::int64_t num_keys) const override;
  double forward_flops(std::int64_t num_tokens) const override;
  std::unique_ptr<DecodeState> decode_state(std::int64_t batch) const override;
  at::Tensor decode_step(DecodeState& state, const AttentionInput& in) const override;

 private:
  MechanismShape shape_;
  std::int64_t width_;
  float dropout_;
  LogitTerms terms_;
};

}  // namespace birkhoff
