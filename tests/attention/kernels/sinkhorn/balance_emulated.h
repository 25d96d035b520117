// The GPU kernels of the Sinkhorn operator, run on the CPU by tests/emulated_cuda.
#pragma once

#include "attention/kernels/sinkhorn/gpu_params.h"

namespace birkhoff {

// `shared_limit`: the bytes of shared memory that a block of the emulated device may use.
void emulate_balance(const BalanceParams& params, int shared_limit);
void emulate_balance_backward(const BalanceBackwardParams& params, int shared_limit);

}  // namespace birkhoff
