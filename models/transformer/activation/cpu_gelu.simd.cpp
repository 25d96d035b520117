// Compiled for InstructionSet::kAvx512Bf16.
#include "models/transformer/activation/cpu_gelu_body.h"

namespace birkhoff {

template <>
const GeluKernels<float>& gelu_kernels<float>() {
  return kGeluKernels<float>;
}
template <>
const GeluKernels<Bf16>& gelu_kernels<Bf16>() {
  return kGeluKernels<Bf16>;
}

}  // namespace birkhoff
