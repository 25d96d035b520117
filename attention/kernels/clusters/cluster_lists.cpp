#include "attention/kernels/clusters/cluster_lists.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "attention/kernels/gathered_attention/inverse_lists.h"

namespace birkhoff {
namespace {

// Lists of buckets in the making. A row's position is its rank among the keys of its bucket: so a
// band of ranks says which of the last keys a query sees, and the ranks are those of keys in the
// query's bucket, wherever the query's own key is.
struct Buckets {
  at::Tensor q_rows_BHL, q_ends_BHG, k_rows_BHL, k_ends_BHG;
  at::Tensor q_rank_BHL;  // keys of its bucket up to its position, less 1
  at::Tensor k_rank_BHL;
};

at::Tensor bucket_of_rows(const ClusterProblem& problem, const ClusteredRows& rows) {
  const std::int64_t K = problem.centroids_HKD.size(1);
  const at::Tensor document_B1L = problem.documents.number_BL.to(at::kLong).unsqueeze(1);
  return (document_B1L * K + rows.cluster_BHL)
      .masked_fill(rows.cluster_BHL < 0, problem.documents.count * K);
}

Buckets sort_into_buckets(const ClusterProblem& problem, const ClusteredRows& q,
                          const ClusteredRows& k) {
  // Rows in no bucket are in bucket G, which is not used.
  const std::int64_t G = problem.documents.count * problem.centroids_HKD.size(1);
  const at::Tensor q_bucket_BHL = bucket_of_rows(problem, q),
                   k_bucket_BHL = bucket_of_rows(problem, k);
  const auto sort = [](const at::Tensor& x) {
    return std::get<1>(at::sort(x, std::optional<bool>(true), /*dim=*/2));
  };
  const auto ends = [&](const at::Tensor& bucket_BHL) {
    return count_numbers(bucket_BHL, G + 1).cumsum(2);
  };
  const auto used = [&](const at::Tensor& ends_BHG) {
    return ends_BHG.narrow(2, 0, G).to(at::kInt).contiguous();
  };
  // Keys and queries together, by bucket, then by position, a key before the query at its position.
  const std::int64_t L = q_bucket_BHL.size(2);
  const at::Tensor row_L = at::arange(L, q_bucket_BHL.options());
  const at::Tensor order_BHR = sort(
      at::cat({k_bucket_BHL * (2 * L) + 2 * row_L, q_bucket_BHL * (2 * L) + 2 * row_L + 1}, 2));
  const at::Tensor keys_so_far_BHR =
      at::zeros_like(order_BHR).scatter(2, order_BHR, order_BHR.lt(L).to(at::kLong).cumsum(2));
  const at::Tensor q_ends_BHG = ends(q_bucket_BHL), k_ends_BHG = ends(k_bucket_BHL);
  const at::Tensor k_starts_BHG = at::constant_pad_nd(k_ends_BHG, {1, -1});
  const auto rank = [&](std::int64_t first, const at::Tensor& bucket_BHL) {
    return (keys_so_far_BHR.narrow(2, first, L) - k_starts_BHG.gather(2, bucket_BHL) - 1)
        .to(at::kInt);
  };
  return {.q_rows_BHL = sort(q_bucket_BHL).to(at::kInt),
          .q_ends_BHG = used(q_ends_BHG),
          .k_rows_BHL = sort(k_bucket_BHL).to(at::kInt),
          .k_ends_BHG = used(k_ends_BHG),
          .q_rank_BHL = rank(L, q_bucket_BHL),
          .k_rank_BHL = rank(0, k_bucket_BHL)};
}

// The same by counting, for one head. Arrays have L or G numbers.
struct BucketsOfHead {
  const std::int32_t* document;
  std::int64_t clusters, L, G;

  std::size_t bucket(const std::int32_t* cluster, std::int64_t row) const {
    return static_cast<std::size_t>(document[row] * clusters + cluster[row]);
  }

  // Lists the rows of each bucket. `ends` is 0 at first.
  void list(const std::int32_t* cluster, std::int32_t* rows, std::int32_t* ends) const {
    for (std::int64_t row = 0; row < L; ++row) {
      if (cluster[row] >= 0) ++ends[bucket(cluster, row)];
    }
    std::vector<std::int32_t> next(static_cast<std::size_t>(G), 0);
    for (std::int64_t g = 1; g < G; ++g) {
      next[static_cast<std::size_t>(g)] = ends[g - 1];
      ends[g] += ends[g - 1];
    }
    for (std::int64_t row = 0; row < L; ++row) {
      if (cluster[row] >= 0) rows[next[bucket(cluster, row)]++] = static_cast<std::int32_t>(row);
    }
  }

  void rank(const std::int32_t* q_cluster, const std::int32_t* k_cluster, std::int32_t* q_rank,
            std::int32_t* k_rank) const {
    std::vector<std::int32_t> keys_so_far(static_cast<std::size_t>(G), 0);
    for (std::int64_t row = 0; row < L; ++row) {
      if (k_cluster[row] >= 0) k_rank[row] = keys_so_far[bucket(k_cluster, row)]++;
      if (q_cluster[row] >= 0) q_rank[row] = keys_so_far[bucket(q_cluster, row)] - 1;
    }
  }
};

Buckets count_into_buckets(const ClusterProblem& problem, const ClusteredRows& q,
                           const ClusteredRows& k) {
  const at::Tensor& number_BL = problem.documents.number_BL;
  const std::int64_t B = q.cluster_BHL.size(0), H = q.cluster_BHL.size(1),
                     L = q.cluster_BHL.size(2), K = problem.centroids_HKD.size(1),
                     G = problem.documents.count * K;
  const auto numbers = [&](std::int64_t count) {
    return at::zeros({B, H, count}, q.cluster_BHL.options());
  };
  const Buckets buckets{numbers(L), numbers(G), numbers(L), numbers(G), numbers(L), numbers(L)};
  at::parallel_for(0, B * H, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t head = begin; head < end; ++head) {
      const auto read = [&](const at::Tensor& x) {
        return x.const_data_ptr<std::int32_t>() + head * x.size(2);
      };
      const auto write = [&](const at::Tensor& x) {
        return x.mutable_data_ptr<std::int32_t>() + head * x.size(2);
      };
      const BucketsOfHead of_head{.document = number_BL.const_data_ptr<std::int32_t>() +
                                              (number_BL.size(0) == 1 ? 0 : head / H) * L,
                                  .clusters = K,
                                  .L = L,
                                  .G = G};
      of_head.list(read(q.cluster_BHL), write(buckets.q_rows_BHL), write(buckets.q_ends_BHG));
      of_head.list(read(k.cluster_BHL), write(buckets.k_rows_BHL), write(buckets.k_ends_BHG));
      of_head.rank(read(q.cluster_BHL), read(k.cluster_BHL), write(buckets.q_rank_BHL),
                   write(buckets.k_rank_BHL));
    }
  });
  return buckets;
}

bool are_shared(const ClusteredRows& q, const ClusteredRows& k) {
  return q.unit_BHLD.is_same(k.unit_BHLD);
}

// bool [B, H, L]: rows that have places, of which each is the first of its segment.
at::Tensor are_always_first(const RowLists& lists) {
  const at::Tensor ends_BHG = lists.ends_BHG.to(at::kLong);
  const at::Tensor starts_BHG = at::constant_pad_nd(ends_BHG, {1, -1});
  const std::int64_t P = lists.rows_BHP.size(2), R = lists.num_rows;
  const auto sizes = std::vector<std::int64_t>{ends_BHG.size(0), ends_BHG.size(1), R + 1};
  // The places of row R are not used.
  const at::Tensor place_P = at::arange(P, ends_BHG.options());
  const at::Tensor row_BHP = lists.rows_BHP.to(at::kLong).masked_fill(
      place_P >= ends_BHG.narrow(2, ends_BHG.size(2) - 1, 1), R);
  const at::Tensor segment_BHP = count_numbers(ends_BHG, P + 1).cumsum(2).narrow(2, 0, P);
  const at::Tensor rank_BHP =
      place_P - starts_BHG.gather(2, segment_BHP.clamp_max(ends_BHG.size(2) - 1));
  const at::Tensor most_BHR =
      at::full(sizes, -1, ends_BHG.options()).scatter_reduce(2, row_BHP, rank_BHP, "amax");
  return most_BHR.narrow(2, 0, R) == 0;
}

}  // namespace

GatheredRows causal_buckets(const ClusterProblem& problem, const ClusteredRows& q,
                            const ClusteredRows& k, std::int64_t window, Path limit) {
  const bool counts = q.cluster_BHL.is_cpu() && choose_path(problem, limit) == Path::kFused;
  const Buckets buckets =
      counts ? count_into_buckets(problem, q, k) : sort_into_buckets(problem, q, k);
  const std::int64_t L = q.cluster_BHL.size(2);
  const RowLists queries = make_row_lists(buckets.q_rows_BHL, buckets.q_ends_BHG, L);
  if (!are_shared(q, k)) {
    return {queries,
            make_row_lists(buckets.k_rows_BHL, buckets.k_ends_BHG, L),
            {.least = 0,
             .most = window - 1,
             .positions_q_BHL = buckets.q_rank_BHL,
             .positions_k_BHS = buckets.k_rank_BHL}};
  }
  DistanceBand band{.least = 0,
                    .most = window - 1,
                    .positions_q_BHL = buckets.k_rank_BHL,
                    .positions_k_BHS = buckets.k_rank_BHL};
  if (window > 1) {
    // The first query of a bucket sees only its own key, at distance 1. The other queries do not see
    // theirs.
    band.least = 1;
    band.positions_q_BHL = buckets.k_rank_BHL.clamp_min(1);
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
