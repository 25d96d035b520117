// Sinkhorn Mixture (Tay et al. 2020, section 3.2.3): Sinkhorn attention plus dense attention on the
// same projections. The outputs are added without a gate.
#pragma once

#include "attention/mechanism.h"
#include "attention/mechanisms/dense/dense.h"
#include "attention/mechanisms/sinkhorn/sinkhorn.h"

namespace birkhoff {

class SinkhornMixtureMechanism : public Mechanism {
 public:
  SinkhornMixtureMechanism(const configs::SinkhornMixture& config, const MechanismShape& shape,
                           const std::string& prefix, Parameters& parameters,
                           const LogitTerms& terms);

  AttentionOutput attend(const AttentionInput& in, Path limit) const override;
  MechanismTraits traits() const override;
  at::Tensor visible_keys(std::int64_t num_queries, std::int64_t num_keys) const override;
  double forward_flops(std::int64_t num_tokens) const override;
  std::unique_ptr<DecodeState> decode_state(std::int64_t batch) const override;
  at::Tensor decode_step(DecodeState& state, const AttentionInput& in) const override;

 private:
  // The input of the dense part: tied values, and its own noise.
  AttentionInput dense_input(const AttentionInput& in) const;

  SinkhornAttention sinkhorn_;
  DenseAttention dense_;
  bool ties_key_value_;
};

}  // namespace birkhoff
