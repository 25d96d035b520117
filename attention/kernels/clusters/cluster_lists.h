// Lists for attention over gathered rows: the rows of a cluster that see each other. A segment is a
// cluster in one document. Legend: see clusters.h.
#pragma once

#include "attention/kernels/clusters/clusters.h"
#include "attention/kernels/gathered_attention/gathered_attention.h"

namespace birkhoff {

// Each query sees the last `window` keys of its cluster up to its own position.
//
// If queries are keys (`k` is `q`), a query's own key is hidden, unless it is the only one that it
// would see: a vector is closer to itself than to any other.
GatheredRows causal_buckets(const ClusterProblem& problem, const ClusteredRows& q,
                            const ClusteredRows& k, std::int64_t window);

// The nearest queries of each cluster see its nearest keys; if `causal`, only keys up to their own
// position, as above. Encoders whose queries are keys hide nothing.
GatheredRows nearest_lists(const ClusteredRows& q, const ClusteredRows& k, bool causal);

// Hides keys of other documents by positions of `band` that keep documents further apart than any
// two of a document's L rows. `band` must not have positions yet. Error(kData) if the positions do
// not fit int32.
void hide_other_documents(const Documents& documents, DistanceBand& band);

// The lists of clusters by pairs of query and key, for metrics: a chunk of queries at a time.
class ClusterPairs {
 public:
  // `rows` are lists of `clusters` clusters in each document; `options` are for integer tensors.
  ClusterPairs(const GatheredRows& rows, std::int64_t clusters, const at::TensorOptions& options);

  // bool [B, H, count, L]: whether queries `first`, `first` + 1, .. see each key. Entries of keys
  // in another document or in padding are unspecified.
  at::Tensor of_queries(std::int64_t first, std::int64_t count) const;

 private:
  at::Tensor q_members_BHKL_, k_members_BHKL_, q_position_BHL_, k_position_BHL_;
  std::int64_t least_, most_;  // of DistanceBand
};

}  // namespace birkhoff
