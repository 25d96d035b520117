// Softmax attention over every key, or every past key and the token's own when causal. On the CPU
// the kernels of attention in blocks with a sequence as one block, on a GPU LibTorch's.
#pragma once

#include "attention/mechanism.h"

namespace birkhoff::configs {
class DenseAttention;
}

namespace birkhoff {

class DenseAttentionMechanism : public Mechanism {
 public:
  DenseAttentionMechanism(const configs::DenseAttention& config, const MechanismShape& shape);

  AttentionOutput reference(const AttentionInput& in) const override;
  AttentionOutput forward(const AttentionInput& in) const override;
  AttentionOutput composed(const AttentionInput& in) const override;
  MechanismProperties properties() const override;
  at::Tensor visible_keys(std::int64_t num_queries, std::int64_t num_keys) const override;
  double forward_flops(std::int64_t num_tokens) const override;
  std::unique_ptr<DecodeState> decode_state(std::int64_t batch) const override;
  at::Tensor decode_step(DecodeState& state, const AttentionInput& in) const override;

 private:
  // bool [B or 1, 1, L, S]; undefined where every key is legal, causality apart.
  at::Tensor legal_keys(const AttentionInput& in) const;

  MechanismShape shape_;
  float dropout_;
};

}  // namespace birkhoff
