// Random problems of choosing blocks, and their results by the definition. Legend: B batch, H
// heads, L tokens, C chosen blocks, D head dim.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "attention/kernels/block_top_k/block_top_k.h"

namespace birkhoff::test {

// B = 2, H = 3. With documents, two of each sample, and padding at the end of the second.
BlockTopK random_choice(std::int64_t L, std::int64_t block, std::int64_t others, bool causal,
                        at::ScalarType dtype, bool documents, std::int64_t head_dim = 8);

// Blocks that are whole and some that are not, more to choose than there are, and none to choose;
// causal and not, with and without documents.
std::vector<BlockTopK> block_top_ks(at::ScalarType dtype);

// The blocks of query t of one head in the order of the definition.
std::vector<int> blocks_of(const BlockTopK& choice, std::int64_t b, std::int64_t h, std::int64_t t);

// Checks the blocks of each query. Returns how many they are.
int expect_blocks_of_the_definition(const BlockTopK& choice, const at::Tensor& chosen_BHLC);

}  // namespace birkhoff::test
