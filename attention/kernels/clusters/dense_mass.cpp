#include "attention/kernels/clusters/dense_mass.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>

#include "attention/kernels/clusters/cluster_lists.h"
#include "attention/kernels/common/grouped_queries.h"
#include "attention/kernels/common/masked_softmax.h"

namespace birkhoff {
namespace {

// bool [B or 1, 1, M, L]: the keys of dense attention.
at::Tensor dense_keys(const ClusterAttention& in, bool shared, std::int64_t first,
                      std::int64_t count) {
  const at::Tensor number_B11L = in.documents.number_BL.unsqueeze(1).unsqueeze(1);
  const at::Tensor number_B1M1 = number_B11L.narrow(3, first, count).transpose(2, 3);
  const at::Tensor same_B1ML = at::logical_and(number_B1M1 == number_B11L, number_B1M1 >= 0);
  if (in.selection == ClusterSelection::kNearest) return same_B1ML;
  const at::Tensor key_L = at::arange(number_B11L.size(3), number_B11L.options()),
                   query_M1 = key_L.narrow(0, first, count).unsqueeze(1);
  if (!shared) return at::logical_and(same_B1ML, key_L <= query_M1);
  const at::Tensor earlier_B1ML = at::logical_and(same_B1ML, key_L < query_M1);
  const at::Tensor is_first_B1M1 = earlier_B1ML.any(3, /*keepdim=*/true).logical_not();
  return at::logical_or(
      earlier_B1ML, at::logical_and(at::logical_and(same_B1ML, is_first_B1M1), key_L == query_M1));
}

}  // namespace

at::Tensor dense_mass(const ClusterAttention& in, const ClusteredTokens& tokens, std::int64_t first,
                      const at::Tensor& seen_BHML) {
  const at::NoGradGuard no_grad;
  const at::ScalarType dtype = in.centroids_HKD.scalar_type();
  const std::int64_t H = in.q_BHLD.size(1), D = in.q_BHLD.size(3), count = seen_BHML.size(2);
  const at::Tensor q_BHMD =
      unit_queries(in.q_BHLD, tokens.q, in.length).narrow(2, first, count).to(dtype);
  const at::Tensor k_BHLD = to_query_heads(tokens.k.unit_BHLD.to(dtype), H);
  at::Tensor scores_BHML = at::matmul(q_BHMD, k_BHLD.transpose(2, 3));
  if (in.relative.defined()) {
    RelativePositions relative = in.relative;
    relative.keys_HRD = relative.keys_HRD.to(dtype);
    const at::Tensor token_L =
        at::arange(k_BHLD.size(2), in.documents.number_BL.options().dtype(at::kLong));
    const at::Tensor rows_ML =
        table_rows(relative, token_L - token_L.narrow(0, first, count).unsqueeze(1));
    scores_BHML = scores_BHML + relative_scores(relative, q_BHMD.unsqueeze(2), rows_ML).squeeze(2);
  }
  const at::Tensor p_BHML = masked_softmax(scores_BHML * (1 / std::sqrt(static_cast<double>(D))),
                                           dense_keys(in, tokens.shared, first, count));
  return p_BHML.masked_fill(to_query_heads(seen_BHML, H).logical_not(), 0).sum();
}

at::Tensor dense_mass(const ClusterAttention& in, const ClusteredTokens& tokens) {
  constexpr std::int64_t kMaxPairs = std::int64_t{1} << 22;  // of a chunk
  const std::int64_t B = in.q_BHLD.size(0), H = in.q_BHLD.size(1), L = in.q_BHLD.size(2),
                     chunk = std::max<std::int64_t>(kMaxPairs / (B * H * L), 1);
  const ClusterPairs pairs(lists_of_clusters(in, tokens), in.centroids_HKD.size(1),
                           in.centroids_HKD.options());
  at::Tensor sum = at::zeros({}, in.centroids_HKD.options());
  for (std::int64_t first = 0; first < L; first += chunk) {
    const std::int64_t count = std::min(chunk, L - first);
    sum = sum + dense_mass(in, tokens, first, pairs.of_queries(first, count));
  }
  return sum;
}

}  // namespace birkhoff
