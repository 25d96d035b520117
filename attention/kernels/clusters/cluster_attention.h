// Attention of queries to keys of their clusters: routing attention with given centroids
// (attention/mechanisms/routing/routing.h explains the choices). Legend: see clusters.h; q has H
// heads, keys and clusters have their own number of heads, which divides H.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "attention/kernels/clusters/clusters.h"
#include "attention/kernels/gathered_attention/gathered_attention.h"

namespace birkhoff {

// The assignment of tokens to clusters.
enum class ClusterSelection {
  kCausalBucket,   // a token joins one cluster; a query sees the last W keys of it up to its own
  kNearest,        // each cluster takes the W queries and the W keys that are nearest to it
  kNearestCausal,  // the same, and a query sees keys up to its own position. Leaks the future
};

struct ClusterAttention {
  // Self-attention. k undefined: queries are keys, of as many heads.
  at::Tensor q_BHLD, k_BHLD, v_BHLD;
  at::Tensor centroids_HKD;  // as in ClusterProblem
  Documents documents;
  double length = 1;  // of queries and keys: logits are length^2 / sqrt(D) times their cosine
  ClusterSelection selection = ClusterSelection::kCausalBucket;
  std::int64_t window = 0;  // W
  SlotMerge merge = SlotMerge::kMean;
  RelativePositions relative{};
  at::Tensor sink_H{};
  float dropout = 0;  // as in GatheredAttention
  std::optional<NoiseKey> noise{};
};

// The `length` with which logits are logit_scale (or sqrt(D) if that is 0) times the cosine.
double length_for(double logit_scale, std::int64_t head_dim);

// The queries as rows of the key heads: with grouped queries, the mean of the unit vectors of each
// group, times `length`. Differentiable.
at::Tensor queries_to_cluster(const at::Tensor& q_BHLD, std::int64_t key_heads, double length);
// Queries of unit length times `length`, of all heads. `clustered` are the clustered rows of
// queries_to_cluster().
at::Tensor unit_queries(const at::Tensor& q_BHLD, const ClusteredRows& clustered, double length);

// Queries and keys with their clusters. If queries are keys, both are the same.
struct ClusteredTokens {
  ClusterProblem of_q, of_k;
  ClusteredRows q, k;
  bool shared;

  // The sum of the distances of queries and, if they have their own, keys: [B, H], of key heads.
  at::Tensor distance_BH() const;
  // Their cluster_sums().
  at::Tensor sums(Path limit) const;
};
ClusteredTokens cluster_tokens(const ClusterAttention& in, Path limit);

// The keys that each query sees.
GatheredRows lists_of_clusters(const ClusterAttention& in, const ClusteredTokens& tokens);

// The output [B, H, L, D]. Differentiable by q, k, v, tables and sinks.
at::Tensor attend_in_clusters(const ClusterAttention& in, const ClusteredTokens& tokens,
                              Path limit);

}  // namespace birkhoff
