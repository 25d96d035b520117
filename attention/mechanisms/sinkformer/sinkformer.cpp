// The Sinkformer's attention (Sander et al. 2022). The operation:
// attention/kernels/sinkformer/sinkformer.h.
//
// Legend: B batch, H heads, L queries, S keys, D head dim.
#include "attention/kernels/sinkformer/sinkformer.h"

#include <ATen/ATen.h>

#include "attention/mechanisms/table.h"
#include "cluster/base/error.h"
#include "configs/schema/attention.pb.h"

namespace birkhoff {
namespace {

BalanceGradient gradient_of(configs::SinkformerAttention::Gradient gradient) {
  switch (gradient) {
    case configs::SinkformerAttention::unrolled:
      return BalanceGradient::kUnrolled;
    case configs::SinkformerAttention::implicit:
      return BalanceGradient::kImplicit;
    case configs::SinkformerAttention::truncated:
      return BalanceGradient::kTruncated;
  }
  return {};
}

class SinkformerAttention final : public Mechanism {
 public:
  explicit SinkformerAttention(const MakeArguments& m)
      : shape_(m.shape),
        half_steps_(m.config.sinkformer().half_steps()),
        gradient_(gradient_of(m.config.sinkformer().gradient())),
        dropout_(m.config.sinkformer().dropout()) {}

  AttentionOutput attend(const AttentionInput& in, Path limit) const override {
    require(in.q_BHLD.size(2) == in.k_BHSD.size(2) ||
                (!in.key_lengths_B.defined() && !in.segments_q_BL.defined()),
            "sinkformer needs as many keys as queries if there is padding or documents");
    DoublyStochasticAttention attention{.q_BHLD = in.q_BHLD,
                                        .k_BHSD = in.k_BHSD,
                                        .v_BHSD = in.v_BHSD,
                                        .query_lengths_B = in.key_lengths_B,
                                        .key_lengths_B = in.key_lengths_B,
                                        .same_document_BLS = {},
                                        .half_steps = half_steps_,
                                        .gradient = gradient_,
                                        .dropout = dropout_,
                                        .noise = in.noise};
    if (in.segments_q_BL.defined()) {
      attention.same_document_BLS = in.segments_q_BL.unsqueeze(2) == in.segments_kv_BS.unsqueeze(1);
    }
    return {attend_doubly_stochastic(attention, limit), {}};
  }

  MechanismTraits traits() const override {
    return {.supports_sets = true,
            .balances_keys = half_steps_ > 1,
            .convex = true,
            .approximate_gradient = half_steps_ > 1 && gradient_ != BalanceGradient::kUnrolled,
            .takes_sinks = false,
            .quadratic = true};
  }

  at::Tensor visible_keys(std::int64_t num_queries, std::int64_t num_keys) const override {
    return at::ones({num_queries, num_keys}, at::kBool);
  }

  // Each half-step computes the scores, the last one also the outputs.
  double forward_flops(std::int64_t num_tokens) const override {
    const double n = static_cast<double>(num_tokens);
    return 2 * (half_steps_ + 1) * n * n * static_cast<double>(shape_.heads * shape_.head_dim);
  }

 private:
  const MechanismShape shape_;
  const int half_steps_;
  const BalanceGradient gradient_;
  const float dropout_;
};

}  // namespace

std::unique_ptr<Mechanism> make_sinkformer(const MakeArguments& m) {
  return std::make_unique<SinkformerAttention>(m);
}

}  // namespace birkhoff
