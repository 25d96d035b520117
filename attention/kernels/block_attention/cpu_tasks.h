// Block attention on the CPU: blocks are cut into tiles, and calls of the loop of cpu_loop.h on
// these tiles are distributed to threads. Used by autograd.cpp.
#pragma once

#include "attention/kernels/block_attention/operands.h"

namespace birkhoff {

// Both functions take contiguous rows of D, in fp32, fp64 or bf16. The results have the same bits
// for any number of threads. Noise is read during the call.

// Fills the results.
void attend_in_tiles(const BlockOperands& operands, const BlockResults& results);

// Fills the gradients of q, keys, tables and sinks, given the forward pass's results (`out` is not
// read). Adds to the gradients of biases and of weights, which are fp64.
void gradients_in_tiles(const BlockOperands& operands, const BlockResults& results,
                        const at::Tensor& d_out_BHNbD, BlockGradients& gradients);

}  // namespace birkhoff
