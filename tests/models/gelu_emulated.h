// The kernels of cpu_gelu.h in a form that any CPU can run.
#pragma once

#include "models/transformer/activation/cpu_gelu.h"

namespace birkhoff::test {

const GeluKernels<float>& emulated_gelu_kernels(float);
const GeluKernels<Bf16>& emulated_gelu_kernels(Bf16);

}  // namespace birkhoff::test
