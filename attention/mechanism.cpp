#include "attention/mechanism.h"

#include "cluster/base/error.h"

namespace birkhoff {

Blocks token_blocks(const AttentionInput& in, std::int64_t block, bool causal) {
  require(in.k_BHSD.size(2) == in.q_BHLD.size(2), "block attention needs as many keys as queries");
  return Blocks(in.q_BHLD, {.key_lengths_B = in.key_lengths_B, .segments_BL = in.segments_q_BL},
                block, causal);
}

std::vector<Choice> Mechanism::choices(const AttentionInput&) const { return {}; }

std::unique_ptr<DecodeState> Mechanism::decode_state(std::int64_t) const {
  require(false, "this mechanism is not causal and cannot decode");
  return nullptr;
}

at::Tensor Mechanism::decode_step(DecodeState&, const AttentionInput&) const {
  require(false, "this mechanism is not causal and cannot decode");
  return {};
}

}  // namespace birkhoff
