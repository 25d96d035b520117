// The choice of blocks on the CPU, a tile of queries at a time. Used by block_top_k.cpp.
// Legend: see block_top_k.h.
#pragma once

#include <ATen/core/Tensor.h>

#include "attention/kernels/block_top_k/block_top_k.h"

namespace birkhoff {

// select_top_blocks() of the problems for which choose_path() returns kFused, from their whole
// blocks. The same bits for any number of threads.
at::Tensor choose_on_cpu(const BlockTopK& choice, const WholeBlocks& blocks);

}  // namespace birkhoff
