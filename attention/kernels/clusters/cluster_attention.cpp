#include "attention/kernels/clusters/cluster_attention.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>

#include <cmath>

#include "attention/kernels/clusters/cluster_lists.h"
#include "attention/kernels/common/grouped_queries.h"

namespace birkhoff {
namespace {

at::Tensor unit_vectors(const at::Tensor& x, double length) {
  return unit_rows(x.to(at::toOpMathType(x.scalar_type())), length).to(x.scalar_type());
}

}  // namespace

double length_for(double logit_scale, std::int64_t head_dim) {
  const double root = std::sqrt(static_cast<double>(head_dim));
  // Attention divides logits by `root`.
  return logit_scale > 0 ? std::sqrt(logit_scale * root) : root;
}

at::Tensor queries_to_cluster(const at::Tensor& q_BHLD, std::int64_t key_heads, double length) {
  return q_BHLD.size(1) == key_heads ? q_BHLD
                                     : group_means(unit_vectors(q_BHLD, length), key_heads);
}

at::Tensor unit_queries(const at::Tensor& q_BHLD, const ClusteredRows& clustered, double length) {
  return q_BHLD.size(1) == clustered.unit_BHLD.size(1) ? clustered.unit_BHLD
                                                       : unit_vectors(q_BHLD, length);
}

at::Tensor ClusteredTokens::distance_BH() const {
  return shared ? q.distance_BH : q.distance_BH + k.distance_BH;
}

at::Tensor ClusteredTokens::sums(Path limit) const {
  const at::Tensor of_queries = cluster_sums(of_q, q, limit);
  return shared ? of_queries : of_queries + cluster_sums(of_k, k, limit);
}

ClusteredTokens cluster_tokens(const ClusterAttention& in, Path limit) {
  const bool shared = !in.k_BHLD.defined(),
             chooses = in.selection != ClusterSelection::kCausalBucket;
  const ClusterProblem of_q{.x_BHLD = queries_to_cluster(in.q_BHLD, in.v_BHLD.size(1), in.length),
                            .centroids_HKD = in.centroids_HKD,
                            .documents = in.documents,
                            .length = in.length,
                            .window = chooses ? in.window : 0};
  ClusterProblem of_k = of_q;
  if (!shared) of_k.x_BHLD = in.k_BHLD;
  const ClusteredRows q = cluster_rows(of_q, limit);
  return {of_q, of_k, q, shared ? q : cluster_rows(of_k, limit), shared};
}

GatheredRows lists_of_clusters(const ClusterAttention& in, const ClusteredTokens& tokens) {
  return in.selection == ClusterSelection::kCausalBucket
             ? causal_buckets(tokens.of_q, tokens.q, tokens.k, in.window)
             : nearest_lists(tokens.q, tokens.k, in.selection == ClusterSelection::kNearestCausal);
}

at::Tensor attend_in_clusters(const ClusterAttention& in, const ClusteredTokens& tokens,
                              Path limit) {
  const GatheredAttention attention{.q_BHLD = unit_queries(in.q_BHLD, tokens.q, in.length),
                                    .k_BHSD = tokens.k.unit_BHLD,
                                    .v_BHSD = in.v_BHLD,
                                    .rows = lists_of_clusters(in, tokens),
                                    .merge = in.merge,
                                    .relative = in.relative,
                                    .sink_H = in.sink_H,
                                    .dropout = in.dropout,
                                    .noise = in.noise};
  return attend_gathered(attention, limit).out_BHLD;
}

}  // namespace birkhoff
