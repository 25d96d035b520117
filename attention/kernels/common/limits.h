// How much a mechanism or an operator can be asked for. Configurations have the same limits, as
// (range) in configs/attention.proto and in configs/check.cpp.
#pragma once

#include <cstdint>

namespace birkhoff {

constexpr std::int64_t kMostBlockTokens = 1'048'576;  // also the most blocks a query looks back
constexpr std::int64_t kMostIterations = 1000;        // of a balance
// Of the prefix balance, whose cost grows with their cube: a balance of u x u for each block u.
constexpr std::int64_t kMostPrefixBlocks = 256;

// Of the CPU kernels of attention in blocks; wider heads take LibTorch's.
constexpr std::int64_t kMostTileHeadDim = 256;

}  // namespace birkhoff
