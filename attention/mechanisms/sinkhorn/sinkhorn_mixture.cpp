#include "attention/mechanisms/sinkhorn/sinkhorn_mixture.h"

#include <ATen/ATen.h>

namespace birkhoff {
namespace {

// Layers are numbered from 0. The dropout of the dense part gets a stream that no layer uses.
constexpr std::uint32_t kDenseStream = 1u << 31;

struct MixtureDecodeState : DecodeState {
  std::unique_ptr<DecodeState> sinkhorn, dense;
};

}  // namespace

SinkhornMixtureMechanism::SinkhornMixtureMechanism(const configs::SinkhornMixture& config,
                                                   const MechanismShape& shape,
                                                   const std::string& prefix,
                                                   Parameters& parameters)
    : sinkhorn_(config.sinkhorn(), shape, prefix, parameters), dense_(config.dense(), shape) {}

AttentionInput SinkhornMixtureMechanism::dense_input(const AttentionInput& in) const {
  AttentionInput dense = in;
  if (sinkhorn_.properties().ties_key_value) dense.v_BHSD = in.k_BHSD;
  if (in.noise) dense.noise = in.noise->at_layer(in.noise->layer | kDenseStream);
  return dense;
}

AttentionOutput SinkhornMixtureMechanism::reference(const AttentionInput& in) const {
  AttentionOutput output = sinkhorn_.reference(in);
  output.out_BHLD = output.out_BHLD + dense_.reference(dense_input(in)).out_BHLD;
  return output;
}

AttentionOutput SinkhornMixtureMechanism::forward(const AttentionInput& in) const {
  AttentionOutput output = sinkhorn_.forward(in);
  output.out_BHLD = output.out_BHLD + dense_.forward(dense_input(in)).out_BHLD;
  return output;
}

AttentionOutput SinkhornMixtureMechanism::composed(const AttentionInput& in) const {
  return {sinkhorn_.composed(in).out_BHLD + dense_.composed(dense_input(in)).out_BHLD, {}};
}

MechanismProperties SinkhornMixtureMechanism::properties() const {
  MechanismProperties properties = sinkhorn_.properties();
  properties.quadratic = true;
  return properties;
}

at::Tensor SinkhornMixtureMechanism::visible_keys(std::int64_t num_queries,
                                                  std::int64_t num_keys) const {
  return dense_.visible_keys(num_queries, num_keys);
}

double SinkhornMixtureMechanism::forward_flops(std::int64_t num_tokens) const {
  return sinkhorn_.forward_flops(num_tokens) + dense_.forward_flops(num_tokens);
}

std::unique_ptr<DecodeState> SinkhornMixtureMechanism::decode_state(std::int64_t batch) const {
  auto state = std::make_unique<MixtureDecodeState>();
  state->sinkhorn = sinkhorn_.decode_state(batch);
  state->dense = dense_.decode_state(batch);
  return state;
}

at::Tensor SinkhornMixtureMechanism::decode_step(DecodeState& state,
                                                 const AttentionInput& in) const {
  auto& parts = static_cast<MixtureDecodeState&>(state);
  return sinkhorn_.decode_step(*parts.sinkhorn, in) +
         dense_.decode_step(*parts.dense, dense_input(in));
}

}  // namespace birkhoff
