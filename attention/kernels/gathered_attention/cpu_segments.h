// Attention over gathered rows on the CPU: it gathers the rows of each segment, calls the loop of
// tile_attention/cpu_loop.h on them, and adds up the slots of each row. Used by autograd.cpp.
#pragma once

#include "attention/kernels/gathered_attention/operands.h"

namespace birkhoff {

// Both functions take contiguous rows of D, in fp32, fp64 or bf16. The results have the same bits
// for any number of threads.

GatheredResults attend_in_segments(GatheredAttention in);

// d_sum_BHL, the gradient of the part's sum, may be undefined.
GatheredGradients gradients_in_segments(GatheredAttention in, const GatheredResults& results,
                                        const at::Tensor& d_out_BHLD, const at::Tensor& d_sum_BHL);

}  // namespace birkhoff
