#include "attention/attention.h"

#include "cluster/base/error.h"

namespace birkhoff {

std::unique_ptr<DecodeState> Mechanism::decode_state(std::int64_t) const {
  require(false, "this mechanism is not causal and cannot decode");
  return nullptr;
}

at::Tensor Mechanism::decode_step(DecodeState&, const AttentionInput&) const {
  require(false, "this mechanism is not causal and cannot decode");
  return {};
}

}  // namespace birkhoff
