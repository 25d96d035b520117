// The choice of blocks on the CPU, a tile of queries at a time. Used by block_choice.cpp.
// Legend: see block_choice.h.
#pragma once

#include <ATen/core/Tensor.h>

#include "attention/kernels/block_choice/block_choice.h"

namespace birkhoff {

// choose_blocks() of the problems for which choose_path() returns kFused, from their whole blocks.
// The same bits for any number of threads.
at::Tensor choose_on_cpu(const BlockChoice& choice, const WholeBlocks& blocks);

}  // namespace birkhoff
