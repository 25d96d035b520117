// Routing attention (Roy et al. 2021, "Efficient Content-Based Sparse Attention with Routing
// Transformers"). Queries and keys of unit length are assigned to clusters around centroids that
// online k-means learns (centroids.h); a query attends to keys of its clusters.
//
// Where the paper is silent, wrong or leaks the future, this code does the following.
// - Queries and keys are assigned separately to the same centroids, or keys are the queries
//   (share_query_key). The paper clusters their sum, which does not bring them together.
// - causal_bucket, the default of decoders: a token joins the cluster with the nearest centroid,
//   and a query sees the last `window` keys of its cluster up to its own position. No token's
//   cluster depends on another token, so it is exactly causal, and decoding gives the same.
// - full_topw, as published, and in encoders: each cluster takes the `window` queries and keys of
//   the sequence that are nearest to it. In a decoder this LEAKS: later tokens decide whether a
//   token is among them. Tokens in no cluster have output 0; tokens in several have the mean over
//   their clusters or one softmax over the keys of all (`overlap`).
// - prefix_topw evaluates a model that full_topw trained without the leak: each query gets the
//   clusters and keys that full_topw would choose from the tokens up to it. Not for training: each
//   query has its own selection. Decoding with full_topw does the same.
// - Masks compare positions in the sequence. (Published code compares ranks in the cluster, which
//   leaks values unless queries are keys.)
// - With grouped queries, clusters belong to key heads: the queries of a group join the clusters of
//   the mean of their unit vectors.
// - The paper trains with dropout of probabilities; a token that is in several clusters draws noise
//   for each separately.
// - If queries are keys, a causal query does not see its own key, unless it would see none.
// - Logits are logit_scale times the cosine of query and key.
// - The commitment loss of a sequence is `commitment` / (H D) times the sum over its tokens of |x /
//   |x| - centroid|^2, for queries and, if they have their own, keys. The trainer divides by the
//   counted targets: without padding this is `commitment` times the mean over heads, tokens and
//   elements. A classifier, which counts one target per sequence, first divides by the sequence's
//   tokens. The loss moves queries and keys, never centroids.
#pragma once

#include "attention/kernels/clusters/cluster_attention.h"
#include "attention/logit_terms.h"
#include "attention/mechanism.h"
#include "attention/mechanisms/routing/centroids.h"
#include "configs/schema/attention.pb.h"

namespace birkhoff {

class RoutingAttention : public Mechanism {
 public:
  // Adds the statistic prefix + ".centroids".
  RoutingAttention(const configs::RoutingAttention& config, const MechanismShape& shape,
                   const std::string& prefix, Parameters& parameters, const LogitTerms& terms);

  AttentionOutput attend(const AttentionInput& in, Path limit) const override;
  MechanismTraits traits() const override;
  at::Tensor visible_keys(std::int64_t num_queries, std::int64_t num_keys) const override;
  std::vector<Choice> choices(const AttentionInput& in) const override;
  double forward_flops(std::int64_t num_tokens) const override;
  std::unique_ptr<DecodeState> decode_state(std::int64_t batch) const override;
  at::Tensor decode_step(DecodeState& state, const AttentionInput& in) const override;

 private:
  // The assignment of tokens to clusters; encoders have full_topw.
  configs::RoutingAttention::CausalSelection selection() const;
  SlotMerge merge() const {
    return config_.overlap() == configs::RoutingAttention::mean ? SlotMerge::kMean
                                                                : SlotMerge::kOneSoftmax;
  }
  // The attention of an input to its clusters. `documents` are the input's.
  ClusterAttention problem(const AttentionInput& in, const Documents& documents) const;
  // The output of one query per sequence from the scores of its query and key and of all earlier
  // tokens (routing_decode.cpp). A dense_mass() that is wanted is added to `mass`.
  at::Tensor attend_prefixes(const ClusterAttention& in, const ClusteredTokens& tokens,
                             at::Tensor& mass) const;
  // Where in_BHK is true, the listed tokens that the query `token` sees.
  at::Tensor visible_tokens(const at::Tensor& in_BHK, const at::Tensor& token_BHKW,
                            std::int64_t token) const;
  NamedSums figure_sums(const ClusterProblem& problem, const ClusteredRows& rows, Path limit) const;

  configs::RoutingAttention config_;
  MechanismShape shape_;
  std::int64_t window_;
  double length_;               // of queries and keys
  std::int64_t all_key_heads_;  // on all ranks of the tensor axis
  Centroids centroids_;
  LogitTerms terms_;
};

}  // namespace birkhoff
