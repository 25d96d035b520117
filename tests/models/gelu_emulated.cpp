#include "tests/models/gelu_emulated.h"

#include "models/transformer/activation/cpu_gelu_body.h"

namespace birkhoff::test {

const GeluKernels<float>& emulated_gelu_kernels(float) { return kGeluKernels<float>; }
const GeluKernels<Bf16>& emulated_gelu_kernels(Bf16) { return kGeluKernels<Bf16>; }

}  // namespace birkhoff::test
