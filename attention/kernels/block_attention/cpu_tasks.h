// Attention in blocks on the CPU: blocks cut into tiles, calls of the loop of cpu_loop.h, and
// their tasks for threads. autograd.cpp is the user.
#pragma once

#include "attention/kernels/block_attention/operands.h"

namespace birkhoff {

// Both: rows of D dense; fp32, fp64 or bf16. The same bits for any number of threads. Noise is read
// when they are called.

// Fills the results.
void attend_in_tiles(const BlockOperands& operands, const BlockResults& results);

// Fills the gradients of q and keys, given the forward pass's results (`out` is not read); adds to
// those of biases, which are fp64.
void gradients_in_tiles(const BlockOperands& operands, const BlockResults& results,
                        const at::Tensor& d_out_BHNbD, const BlockGradients& gradients);

}  // namespace birkhoff
