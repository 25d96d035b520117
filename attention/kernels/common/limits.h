// Limits on the arguments of mechanisms and operators. Configurations have the same limits, as
// (range) and (most_causal_blocks) in configs/schema/attention.proto.
#pragma once

#include <cstdint>

namespace birkhoff {

constexpr std::int64_t kMaxBlockTokens = 1'048'576;  // also the limit of look_back and look_ahead
constexpr std::int64_t kMaxIterations = 1000;        // of a balance
// For the prefix balance, which balances a u x u matrix for each block u: its cost grows with the
// cube of the number of blocks.
constexpr std::int64_t kMaxPrefixBlocks = 256;

// For the CPU kernels of block attention; wider heads use LibTorch.
constexpr std::int64_t kMaxTileHeadDim = 256;

}  // namespace birkhoff
