#include "attention/kernels/clusters/cluster_lists.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

#include "attention/kernels/counting_sort/counting_sort.h"
#include "cluster/base/error.h"

namespace birkhoff {
namespace {

// int32 [B, H, L], from 0; negative or too large for rows in no bucket.
at::Tensor bucket_of_rows(const ClusterProblem& problem, const ClusteredRows& rows) {
  if (problem.documents.count == 1) return rows.cluster_BHL;
  const std::int64_t K = problem.centroids_HKD.size(1);
  const at::Tensor document_B1L = problem.documents.number_BL.to(at::kLong).unsqueeze(1);
  return (document_B1L * K + rows.cluster_BHL)
      .masked_fill(rows.cluster_BHL < 0, problem.documents.count * K)
      .to(at::kInt);
}

bool are_shared(const ClusteredRows& q, const ClusteredRows& k) {
  return q.unit_BHLD.is_same(k.unit_BHLD);
}

// The row and the segment of each slot, int64; row num_rows and a segment that exists where the
// slot is not used.
struct ListedSlots {
  at::Tensor row_BHP, segment_BHP;

  explicit ListedSlots(const RowLists& lists) {
    const at::Tensor ends_BHG = lists.ends_BHG.to(at::kLong);
    const std::int64_t P = lists.rows_BHP.size(2), G = ends_BHG.size(2);
    segment_BHP = count_numbers(ends_BHG, P + 1).cumsum(2).narrow(2, 0, P);
    row_BHP = lists.rows_BHP.to(at::kLong).masked_fill(segment_BHP == G, lists.num_rows);
    segment_BHP = segment_BHP.clamp_max(G - 1);
  }
};

// bool [B, H, L]: whether each slot of a row is the first of its segment. True for rows without
// slots, whose positions are not read.
at::Tensor are_always_first(const RowLists& lists) {
  const at::Tensor starts_BHG = at::constant_pad_nd(lists.ends_BHG, {1, -1});
  const at::Tensor first_row_BHG =
      lists.rows_BHP.gather(2, starts_BHG.clamp_max(lists.rows_BHP.size(2) - 1).to(at::kLong))
          .masked_fill_(starts_BHG == lists.ends_BHG, lists.num_rows);  // of no slot
  const at::Tensor firsts_BHL =
      count_numbers(first_row_BHG, lists.num_rows + 1).narrow(2, 0, lists.num_rows);
  return firsts_BHL == lists.starts_BHR.diff();
}

// [B, H, K, L], 1 where the row is in the cluster in its document, else 0.
at::Tensor members_of_clusters(const RowLists& lists, std::int64_t K,
                               const at::TensorOptions& options) {
  const ListedSlots slots(lists);
  const std::int64_t B = slots.row_BHP.size(0), H = slots.row_BHP.size(1), R = lists.num_rows + 1;
  const at::Tensor index_BHP = slots.segment_BHP.remainder(K) * R + slots.row_BHP;
  return at::zeros({B, H, K * R}, options)
      .scatter(2, index_BHP, 1)
      .view({B, H, K, R})
      .narrow(3, 0, lists.num_rows);
}

// p of DistanceBand, [B, H, L] or [L]. int64, like the bounds of distances.
at::Tensor positions_of(const at::Tensor& positions_BHL, const RowLists& lists) {
  return positions_BHL.defined()
             ? positions_BHL.to(at::kLong)
             : at::arange(lists.num_rows, lists.rows_BHP.options().dtype(at::kLong));
}

}  // namespace

void hide_other_documents(const Documents& documents, DistanceBand& band) {
  if (documents.count == 1) return;
  const std::int64_t L = documents.number_BL.size(1);
  if (!fit_document_positions(documents.count, L)) {
    fail(
        ExitCode::kData,
        "attention over gathered rows: {} documents in a sequence of {} tokens; their product must "
        "be below 2^31: use shorter sequences, or set data.restart_at_documents: false",
        documents.count, L);
  }
  separate_documents(documents.number_BL, band);
}

ClusterPairs::ClusterPairs(const GatheredRows& rows, std::int64_t clusters,
                           const at::TensorOptions& options)
    : q_members_BHKL_(members_of_clusters(rows.queries, clusters, options)),
      k_members_BHKL_(members_of_clusters(rows.keys, clusters, options)),
      q_position_BHL_(positions_of(rows.band.positions_q_BHL, rows.queries)),
      k_position_BHL_(positions_of(rows.band.positions_k_BHS, rows.keys)),
      least_(rows.band.least),
      most_(rows.band.most) {}

at::Tensor ClusterPairs::of_queries(std::int64_t first, std::int64_t count) const {
  const at::Tensor shared_BHML =
      at::matmul(q_members_BHKL_.narrow(3, first, count).transpose(2, 3), k_members_BHKL_);
  const at::Tensor distance_BHML =
      q_position_BHL_.narrow(-1, first, count).unsqueeze(-1) - k_position_BHL_.unsqueeze(-2);
  return at::logical_and(shared_BHML > 0,
                         at::logical_and(distance_BHML >= least_, distance_BHML <= most_));
}

GatheredRows causal_buckets(const ClusterProblem& problem, const ClusteredRows& q,
                            const ClusteredRows& k, std::int64_t window) {
  const std::int64_t G = problem.documents.count * problem.centroids_HKD.size(1);
  const bool shared = are_shared(q, k);
  const auto lists_of = [&](const RankedIndices& buckets) {
    return make_permuted_lists(buckets.sorted.order_BHP, buckets.sorted.starts_BHR.narrow(2, 1, G),
                               buckets.ranks.position_BHP, !problem.documents.has_padding);
  };
  // A row's position is its rank among the keys of its bucket: so a band of ranks says which of the
  // last keys a query sees.
  const at::Tensor q_bucket_BHL = bucket_of_rows(problem, q);
  const RankedIndices keys =
      ranked_counting_sort(bucket_of_rows(problem, k), G, shared ? at::Tensor() : q_bucket_BHL);
  DistanceBand band{.least = 0,
                    .most = window - 1,
                    .positions_q_BHL = keys.ranks.other_rank_BHP,
                    .positions_k_BHS = keys.ranks.rank_BHP};
  const RowLists key_lists = lists_of(keys);
  if (!shared) return {lists_of(ranked_counting_sort(q_bucket_BHL, G)), key_lists, band};
  band.positions_q_BHL = keys.ranks.rank_BHP;
  if (window > 1) {
    // The first query of a bucket sees only its own key, at distance 1. No other query sees its own
    // key.
    band.least = 1;
    band.positions_q_BHL = keys.ranks.rank_BHP.clamp_min(1);
  }
  return {key_lists, key_lists, band};
}

GatheredRows nearest_lists(const ClusteredRows& q, const ClusteredRows& k, bool causal) {
  const std::int64_t L = q.cluster_BHL.size(2);
  const RowLists queries = make_row_lists(q.nearest_BHP, q.nearest_ends_BHG, L, /*distinct=*/true);
  DistanceBand band;
  if (causal) band.least = 0;
  if (!are_shared(q, k)) {
    return {queries, make_row_lists(k.nearest_BHP, k.nearest_ends_BHG, L, /*distinct=*/true), band};
  }
  if (causal) {
    // A row that would see no other key sees its own, at distance 1.
    band.least = 1;
    band.positions_q_BHL =
        at::arange(L, q.cluster_BHL.options()) + are_always_first(queries).to(at::kInt);
  }
  return {queries, queries, band};
}

}  // namespace birkhoff
