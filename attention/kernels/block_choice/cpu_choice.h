// The choice of blocks on the CPU, a tile of queries at a time. Used by block_choice.cpp.
// Legend: see block_choice.h.
#pragma once

#include <ATen/core/Tensor.h>

#include "attention/kernels/block_choice/block_choice.h"

namespace birkhoff {

// choose_blocks(), from the mean keys of whole blocks, in the dtype of sums, and their documents,
// int32 [B or 1, N], -1 for blocks that cannot be chosen.
at::Tensor choose_on_cpu(const BlockChoice& choice, const at::Tensor& mean_BHND,
                         const at::Tensor& document_BN);

}  // namespace birkhoff
