#include "attention/kernels/clusters/cluster_lists.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "attention/kernels/counting_sort/counting_sort.h"
#include "cluster/base/error.h"

namespace birkhoff {
namespace {

// int32 [B, H, L]; rows in no bucket get one more bucket, which is not used.
at::Tensor bucket_of_rows(const ClusterProblem& problem, const ClusteredRows& rows) {
  const std::int64_t K = problem.centroids_HKD.size(1);
  const at::Tensor document_B1L = problem.documents.number_BL.to(at::kLong).unsqueeze(1);
  return (document_B1L * K + rows.cluster_BHL)
      .masked_fill(rows.cluster_BHL < 0, problem.documents.count * K)
      .to(at::kInt);
}

// A row's position is its rank among the keys of its bucket: so a band of ranks says which of the
// last keys a query sees. Made from the buckets of queries and keys, of which there are G besides
// the unused one.
struct Ranks {
  at::Tensor q_BHL;  // keys of the query's bucket up to its position, less 1
  at::Tensor k_BHL;
};

// Keys and queries together, by bucket, then by position, a key before the query at its position.
Ranks rank_by_grouping(const at::Tensor& q_bucket_BHL, const at::Tensor& k_bucket_BHL,
                       const SortedIndices& keys, std::int64_t G) {
  const at::Tensor order_BHR =
      counting_sort(at::stack({k_bucket_BHL, q_bucket_BHL}, 3).flatten(2), G)
          .order_BHP.to(at::kLong);
  const at::Tensor keys_so_far_BHL2 =
      at::zeros_like(order_BHR)
          .scatter(2, order_BHR, at::remainder(order_BHR, 2).eq(0).to(at::kLong).cumsum(2))
          .unflatten(2, {q_bucket_BHL.size(2), 2});
  const auto rank = [&](std::int64_t which, const at::Tensor& bucket_BHL) {
    return (keys_so_far_BHL2.select(3, which) -
            keys.starts_BHR.gather(2, bucket_BHL.to(at::kLong)) - 1)
        .to(at::kInt);
  };
  return {rank(1, q_bucket_BHL), rank(0, k_bucket_BHL)};
}

// The same on the CPU, where it is faster.
Ranks rank_by_counting(const at::Tensor& q_bucket_BHL, const at::Tensor& k_bucket_BHL,
                       std::int64_t G) {
  const std::int64_t L = q_bucket_BHL.size(2);
  const Ranks ranks{at::empty_like(q_bucket_BHL), at::empty_like(k_bucket_BHL)};
  const auto* q_bucket = q_bucket_BHL.const_data_ptr<std::int32_t>();
  const auto* k_bucket = k_bucket_BHL.const_data_ptr<std::int32_t>();
  auto* q_rank = ranks.q_BHL.mutable_data_ptr<std::int32_t>();
  auto* k_rank = ranks.k_BHL.mutable_data_ptr<std::int32_t>();
  at::parallel_for(0, q_bucket_BHL.numel() / L, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t head = begin; head < end; ++head) {
      std::vector<std::int32_t> keys_so_far(static_cast<std::size_t>(G + 1), 0);
      for (std::int64_t at = head * L; at < (head + 1) * L; ++at) {
        k_rank[at] = keys_so_far[static_cast<std::size_t>(k_bucket[at])]++;
        q_rank[at] = keys_so_far[static_cast<std::size_t>(q_bucket[at])] - 1;
      }
    }
  });
  return ranks;
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

// bool [B, H, L]: rows that have slots, each of which is the first of its segment.
at::Tensor are_always_first(const RowLists& lists) {
  const at::Tensor starts_BHG = at::constant_pad_nd(lists.ends_BHG.to(at::kLong), {1, -1});
  const std::int64_t P = lists.rows_BHP.size(2), R = lists.num_rows;
  const ListedSlots slots(lists);
  const at::Tensor rank_BHP =
      at::arange(P, starts_BHG.options()) - starts_BHG.gather(2, slots.segment_BHP);
  const at::Tensor most_BHR =
      at::full({starts_BHG.size(0), starts_BHG.size(1), R + 1}, -1, starts_BHG.options())
          .scatter_reduce(2, slots.row_BHP, rank_BHP, "amax");
  return most_BHR.narrow(2, 0, R) == 0;
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
  if (documents.count * L > std::numeric_limits<std::int32_t>::max()) {
    fail(
        ExitCode::kData,
        "attention over gathered rows: {} documents in a sequence of {} tokens; their product must "
        "be below 2^31: use shorter sequences, or set data.restart_at_documents: false",
        documents.count, L);
  }
  const at::Tensor& number_BL = documents.number_BL;
  const at::Tensor position_B1L =
      (number_BL.to(at::kLong) * L + at::arange(L, number_BL.options().dtype(at::kLong)))
          .to(at::kInt)
          .unsqueeze(1);
  band.positions_q_BHL = band.positions_k_BHS = position_B1L;
  band.least = std::max(band.least, 1 - L);
  band.most = std::min(band.most, L - 1);
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
                            const ClusteredRows& k, std::int64_t window, Path limit) {
  const std::int64_t G = problem.documents.count * problem.centroids_HKD.size(1),
                     L = q.cluster_BHL.size(2);
  const at::Tensor q_bucket_BHL = bucket_of_rows(problem, q),
                   k_bucket_BHL = bucket_of_rows(problem, k);
  const SortedIndices keys = counting_sort(k_bucket_BHL, G);
  const bool counts = q.cluster_BHL.is_cpu() && choose_path(problem, limit) == Path::kFused;
  const Ranks ranks = counts ? rank_by_counting(q_bucket_BHL, k_bucket_BHL, G)
                             : rank_by_grouping(q_bucket_BHL, k_bucket_BHL, keys, G);
  const auto lists_of = [&](const SortedIndices& groups) {
    return make_row_lists(groups.order_BHP, groups.starts_BHR.narrow(2, 1, G), L);
  };
  const RowLists queries = lists_of(counting_sort(q_bucket_BHL, G));
  DistanceBand band{.least = 0,
                    .most = window - 1,
                    .positions_q_BHL = ranks.q_BHL,
                    .positions_k_BHS = ranks.k_BHL};
  if (!are_shared(q, k)) return {queries, lists_of(keys), band};
  band.positions_q_BHL = ranks.k_BHL;
  if (window > 1) {
    // The first query of a bucket sees only its own key, at distance 1. No other query sees its own
    // key.
    band.least = 1;
    band.positions_q_BHL = ranks.k_BHL.clamp_min(1);
  }
  return {queries, queries, band};
}

GatheredRows nearest_lists(const ClusteredRows& q, const ClusteredRows& k, bool causal) {
  const std::int64_t L = q.cluster_BHL.size(2);
  const RowLists queries = make_row_lists(q.nearest_BHP, q.nearest_ends_BHG, L);
  DistanceBand band;
  if (causal) band.least = 0;
  if (!are_shared(q, k)) {
    return {queries, make_row_lists(k.nearest_BHP, k.nearest_ends_BHG, L), band};
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
