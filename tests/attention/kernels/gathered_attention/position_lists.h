// Lists whose keys depend only on positions: sliding windows, strided attention, blocks. All heads
// and samples share them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "attention/kernels/gathered_attention/gathered_attention.h"

namespace birkhoff {

// Query i sees the keys j with |i - j| < width, if causal those with 0 <= i - j < width.
GatheredRows sliding_window_lists(std::int64_t num_tokens, std::int64_t width, bool causal,
                                  at::Device device);

// Query i sees the keys j <= i - stride with (i - j) mod stride = 0: the summaries of strided
// attention (Child et al. 2019, section 4.3), except i itself, which belongs to its causal window
// of width `stride`, the other part.
GatheredRows strided_lists(std::int64_t num_tokens, std::int64_t stride, at::Device device);

// The queries of block n of `block` tokens see the blocks keys_of[n], if causal only keys up to
// their own position. The last block may be shorter.
GatheredRows listed_blocks(std::int64_t num_tokens, std::int64_t block,
                           const std::vector<std::vector<std::int64_t>>& keys_of, bool causal,
                           at::Device device);

}  // namespace birkhoff
