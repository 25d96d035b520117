// The patterns of the Sparse Transformer (Child et al. 2019, sections 4.2 and 4.3), as lists for
// attention over gathered rows. A causal query i sees the keys j of two parts:
//
//   fixed:    floor(j / l) = floor(i / l);   j mod l >= l - c, the summaries
//   strided:  0 <= i - j < l;                (i - j) mod l = 0
//
// with j <= i. An encoder drops j <= i, and its window is |i - j| < l. Positions count from the
// start of the sequence, also where documents hide keys.
//
// Legend: B batch, H heads, L tokens, D head dim.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "attention/kernels/clusters/clusters.h"
#include "attention/kernels/gathered_attention/gathered_attention.h"

namespace birkhoff {

struct SparsePattern {
  bool strided = false;  // else fixed
  bool merged = true;    // queries see both parts; else the second only
  bool causal = true;
  std::int64_t stride = 1;   // l
  std::int64_t summary = 1;  // c, from 1 to l; not read if strided

  // bool: whether queries see keys; int64 positions, broadcastable.
  at::Tensor sees(const at::Tensor& query, const at::Tensor& key) const;
  // How many keys query i of L sees.
  std::int64_t num_visible(std::int64_t i, std::int64_t L) const;
};

// The lists of the pattern for L tokens: each part is one attention over gathered rows. No query
// has a key in two lists, so that the parts merge into one softmax: summaries are not in the lists
// of blocks, and multiples of l in the window are not in those of columns. Cost: L (l + L c / l) or
// L (l + L / l) pairs.
std::vector<GatheredRows> lists_of_pattern(const SparsePattern& pattern, std::int64_t L,
                                           at::Device device);

// Attention with those lists; `in` without rows and sinks. `documents` hides keys of other
// documents; padding is hidden by key_lengths_B of `in`. Differentiable as attend_gathered().
AttentionPart attend_in_pattern(std::vector<GatheredRows> lists, const GatheredAttention& in,
                                const Documents& documents, Path limit);

}  // namespace birkhoff
