// Sinkhorn Mixture (Tay et al. 2020, section 3.2.3): Sinkhorn attention plus dense attention on the
// same projections. The outputs are added without a gate.
#include <ATen/ATen.h>

#include "attention/mechanism.h"
#include "attention/mechanisms/dense/dense.h"
#include "attention/mechanisms/sinkhorn/sinkhorn.h"
#include "attention/mechanisms/table.h"

namespace birkhoff {
namespace {

// Layers are numbered from 0. The dropout of the dense part gets a stream that no layer uses.
constexpr std::uint32_t kDenseStream = 1u << 31;

struct MixtureDecodeState final : DecodeState {
  void select_rows(const at::Tensor& rows_B) override {
    sinkhorn->select_rows(rows_B);
    dense->select_rows(rows_B);
  }

  std::unique_ptr<DecodeState> sinkhorn, dense;
};

class SinkhornMixtureMechanism final : public Mechanism {
 public:
  SinkhornMixtureMechanism(const configs::SinkhornMixture& config, const MechanismShape& shape,
                           const std::string& prefix, Parameters& parameters,
                           const LogitTerms& terms)
      : sinkhorn_(config.sinkhorn(), shape, prefix, parameters, terms),
        dense_(config.dense(), shape, prefix + ".dense", parameters, terms) {}

  AttentionOutput attend(const AttentionInput& in, Path limit) const override {
    AttentionOutput output = sinkhorn_.attend(in, limit);
    output.out_BHLD = output.out_BHLD + dense_.attend(dense_input(in), limit).out_BHLD;
    return output;
  }

  std::int64_t first_tokens() const override { return sinkhorn_.first_tokens(); }

  MechanismTraits traits() const override {
    MechanismTraits traits = sinkhorn_.traits();
    traits.convex = false;   // the sum of two means
    traits.selects = false;  // the dense part reaches all keys
    traits.takes_relative_positions = false;
    traits.quadratic = true;
    return traits;
  }

  at::Tensor visible_keys(std::int64_t num_queries, std::int64_t num_keys) const override {
    return dense_.visible_keys(num_queries, num_keys);
  }

  std::vector<Choice> choices(const AttentionInput& in) const override {
    return sinkhorn_.choices(in);
  }

  double forward_flops(std::int64_t num_tokens) const override {
    return sinkhorn_.forward_flops(num_tokens) + dense_.forward_flops(num_tokens);
  }

  std::unique_ptr<DecodeState> decode_state(std::int64_t batch) const override {
    auto state = std::make_unique<MixtureDecodeState>();
    state->sinkhorn = sinkhorn_.decode_state(batch);
    state->dense = dense_.decode_state(batch);
    return state;
  }

  at::Tensor decode_step(DecodeState& state, const AttentionInput& in) const override {
    auto& parts = static_cast<MixtureDecodeState&>(state);
    return sinkhorn_.decode_step(*parts.sinkhorn, in) +
           dense_.decode_step(*parts.dense, dense_input(in));
  }

 private:
  // The input of the dense part, with its own noise.
  static AttentionInput dense_input(const AttentionInput& in) {
    AttentionInput dense = in;
    if (in.noise) dense.noise = in.noise->at_layer(in.noise->layer | kDenseStream);
    return dense;
  }

  SinkhornAttention sinkhorn_;
  DenseAttention dense_;
};

}  // namespace

std::unique_ptr<Mechanism> make_sinkhorn_mixture(const MakeArguments& m) {
  return std::make_unique<SinkhornMixtureMechanism>(m.config.sinkhorn_mixture(), m.shape, m.prefix,
                                                    m.parameters, m.terms);
}

}  // namespace birkhoff
