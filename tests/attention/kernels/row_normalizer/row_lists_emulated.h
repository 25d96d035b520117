// The GPU kernels of attention over a list of keys for each query, run on the CPU by
// tests/emulated_cuda.
#pragma once

#include "attention/kernels/row_normalizer/gpu_params.h"

namespace birkhoff::test {

void emulate_listed_values(const TopKParams& params);
void emulate_listed_gradients(const TopKParams& params);

}  // namespace birkhoff::test
