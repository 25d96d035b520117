// The share of dense attention that clusters hold: for a query, the sum of p_dense over the keys
// that it sees, each counted once even if it shares several clusters with the query.
//
// p_dense is the softmax of the same logits (unit vectors, `length`, relative positions) over all
// keys of the query's document, in causal attention up to the query's own position. It equals one
// cluster with a window for all tokens, so the rule for the query's own key is the one of
// cluster_lists.h: if queries are keys, a causal query does not see its own, unless it is the first
// of its document. A query without another token in its cluster then has a share of 0. A
// sink takes part in neither.
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

// The same for all queries and the keys that they see in attend_in_clusters().
at::Tensor dense_mass(const ClusterAttention& in, const ClusteredTokens& tokens);

}  // namespace birkhoff
