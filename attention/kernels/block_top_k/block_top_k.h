// The choice of the blocks of keys that each query sees (Lu et al. 2025, "MoBA: Mixture of Block
// Attention for Long-Context LLMs", section 2.2): its own block, and the blocks whose mean keys
// have the largest products with the query. Attention over gathered rows then reads each block for
// all of its queries.
//
// Legend: B batch, H heads, L tokens, N blocks, D head dim, C chosen blocks, G segments.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "attention/kernels/clusters/clusters.h"
#include "attention/kernels/common/path.h"
#include "attention/kernels/gathered_attention/gathered_attention.h"

namespace birkhoff {

// Self-attention of as many queries as keys; q and k have as many heads.
struct BlockTopK {
  at::Tensor q_BHLD, k_BHLD;
  Documents documents;
  std::int64_t block = 0;   // tokens of a block; the last may have fewer
  std::int64_t others = 0;  // maximum number of blocks that a query sees besides its own
  bool causal = false;      // only earlier blocks
};

// The whole blocks, which queries compare. No gradients.
struct WholeBlocks {
  at::Tensor mean_BHND;    // their mean keys, in the dtype of sums
  at::Tensor document_BN;  // int32; -1: more than one, or padding. B may be 1

  explicit WholeBlocks(const BlockTopK& choice);
};

// The fastest path up to `limit` that supports q; kSdpa is never it. kFused: on the CPU fp32, fp64
// and bf16, on a GPU fp32, bf16 and fp16 with C up to 64; D up to 256.
PathChoice choose_path(const BlockTopK& choice, Path limit);

// int32 [B, H, L, C]: for each query the chosen blocks, the best first, -1 where there are no more.
// A block can be chosen if it is whole, all of it belongs to the query's document, and, if causal,
// it ends before the query's own block begins: then no choice depends on later tokens. Among equal
// products the earlier block wins; NaN counts as the largest. No gradients.
//
// kFused stores the products of one tile of queries at a time (on a GPU with a tile of blocks), the
// reference all products. On the CPU the same bits for any number of threads; on a GPU the same
// bits each time, asynchronous on the current stream.
at::Tensor select_top_blocks(const BlockTopK& choice, Path limit);

// int64 [.., count]: the indices of the largest of scores [.., N], the largest first. Among equal
// scores the earlier comes first; NaN counts as the largest.
at::Tensor largest_first(const at::Tensor& scores, std::int64_t count);

// Segment n has block n as its keys, and the queries that see it: the block's own queries, then the
// queries that chose it, in ascending order.
GatheredRows lists_of_blocks(const BlockTopK& choice, const at::Tensor& chosen_BHLC);

}  // namespace birkhoff
