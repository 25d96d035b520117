// How much of dense attention clusters hold: for a query, the sum of p_dense over the keys that it
// sees, each counted once although it may share several clusters with the query.
//
// p_dense is the softmax of the same logits (unit vectors, `length`, relative positions) over all
// keys of the query's document, of causal attention up to the query's own position. It is what one
// cluster with a window for all tokens computes, so its rule for the query's own key is that of
// cluster_lists.h: if queries are keys, a causal query does not see its own, unless it is the first
// of its document. The only query of a cluster then sees nothing of dense attention. A sink takes
// part in neither.
//
// For evaluation: plain LibTorch operations on a chunk of queries and all keys at a time. No
// gradients. Legend: B batch, H key heads, M queries of a chunk, L tokens.
#pragma once

#include "attention/kernels/clusters/cluster_attention.h"

namespace birkhoff {

// 0-dim, in the dtype of sums: the sum over samples, query heads and the queries `first`,
// `first` + 1, .., which see the keys where seen_BHML. Padding adds 0.
at::Tensor dense_mass(const ClusterAttention& in, const ClusteredTokens& tokens, std::int64_t first,
                      const at::Tensor& seen_BHML);

// The same of all queries and the keys that attend_in_clusters() shows them.
at::Tensor dense_mass(const ClusterAttention& in, const ClusteredTokens& tokens, Path limit);

}  // namespace birkhoff
