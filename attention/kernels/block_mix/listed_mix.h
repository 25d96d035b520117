// Block mixing where each destination has a list of sources: y_u = sum_i w_ui x_{s_ui}. Legend: B
// batch, H heads, N blocks, U destinations, at most N, m sources of a destination, b tokens of a
// block, D head dim.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "attention/kernels/block_mix/block_mix.h"

namespace birkhoff {

// Whether mix_listed_blocks() supports x and is faster than matrix products over all pairs of
// blocks, where there are `num_pairs` for each block.
bool prefers_listed_mix(const at::Tensor& x_BHNbD, std::int64_t num_pairs);

// On the CPU, in fp32, fp64 and bf16; sums in fp32 at least. Weights [B, H, U, m] (B or H may be
// 1), and sources of the same sizes: int64 indices of blocks. A source with weight 0 is not read,
// and its weight gets no gradient. The same bits for any number of threads. Second gradients are
// not supported.
BlockMixes mix_listed_blocks(const at::Tensor& weights_BHUm, const at::Tensor& sources_BHUm,
                             const std::vector<at::Tensor>& x_BHNbD);

}  // namespace birkhoff
