#include "attention/kernels/block_attention/gpu_terms.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <numbers>

namespace birkhoff {
namespace {

// Rows [first, first + count) of the table, which keys of this window can reach, and the distance
// of the first row.
struct ReachedRows {
  std::int64_t first, count, least;
};
ReachedRows reached_rows(const RelativePositions& relative, const KeyWindow& window,
                         std::int64_t block) {
  const bool own_past = window.causal && window.last_offset == 0;
  const std::int64_t lowest = window.first_offset * block - (block - 1),
                     highest = window.last_offset * block + (own_past ? 0 : block - 1);
  const auto row_of = [&](std::int64_t distance) {
    return std::clamp<std::int64_t>(distance - relative.least, 0, relative.num_distances() - 1);
  };
  const std::int64_t first = row_of(lowest);
  // A table beyond all distances has one such row; any distance will do for it.
  return {first, row_of(highest) - first + 1, std::clamp(relative.least + first, lowest, highest)};
}

// The blocks of a [B, H, N, b, x] tensor as one sequence, in fp32: [B, H, N b, x].
at::Tensor sequence_of(const at::Tensor& x) { return x.flatten(2, 3).to(at::kFloat); }

// These rows of the table, in fp32.
at::Tensor table_of(const RelativePositions& relative, std::int64_t first, std::int64_t count) {
  return relative.keys_HRD.narrow(1, first, count).to(at::kFloat);
}

at::Tensor sink_gradient(const BlockOperands& operands, const BlockResults& results,
                         const at::Tensor& delta_BHNb) {
  const at::Tensor sink_H11 = operands.sink_H.to(at::kFloat).view({-1, 1, 1});
  // At most 0 where a query sees a key; elsewhere z is 0, and a large power times 0 would be NaN.
  const at::Tensor power_BHNb =
      (sink_H11 * std::numbers::log2e_v<float> - results.softmax_2BHNb[0]).clamp_max(0);
  const at::Tensor terms_BHNb = power_BHNb.exp2() * results.softmax_2BHNb[1] * delta_BHNb;
  return terms_BHNb.sum(3).sum(2).sum(0).neg().to(operands.sink_H.scalar_type());
}

}  // namespace

DistanceScores distance_scores(const BlockOperands& operands, bool backward) {
  const auto keys = std::find_if(operands.keys.begin(), operands.keys.end(),
                                 [](const KeyBlocks& each) { return each.in_place; });
  if (!operands.relative.defined() || keys == operands.keys.end()) return {};
  const at::Tensor& q_BHNbD = operands.q_BHNbD;
  const auto [first, count, least] = reached_rows(operands.relative, keys->window, q_BHNbD.size(3));
  const at::Tensor table_HRD = table_of(operands.relative, first, count),
                   scores_BHLR = at::matmul(sequence_of(q_BHNbD), table_HRD.transpose(1, 2));
  DistanceScores distances{
      .scores_BHNbR = scores_BHLR.contiguous().unflatten(2, {q_BHNbD.size(2), q_BHNbD.size(3)}),
      .d_s_BHNbR = {},
      .first = first,
      .least = least};
  if (backward) distances.d_s_BHNbR = at::zeros_like(distances.scores_BHNbR);
  return distances;
}

void add_term_gradients(const BlockOperands& operands, const BlockResults& results,
                        const at::Tensor& delta_BHNb, const DistanceScores& distances,
                        BlockGradients& gradients) {
  const at::Tensor &q_BHNbD = operands.q_BHNbD, &table_HRD = operands.relative.keys_HRD;
  if (operands.sink_H.defined()) {
    gradients.d_sink_H = sink_gradient(operands, results, delta_BHNb);
  }
  if (operands.relative.defined()) gradients.d_relative_keys_HRD = at::zeros_like(table_HRD);
  if (!distances.defined()) return;
  const std::int64_t rows = distances.scores_BHNbR.size(4);
  const at::Tensor d_s_BHLR =
      distances.d_s_BHNbR.flatten(2, 3) * (1 / std::sqrt(static_cast<double>(q_BHNbD.size(4))));
  gradients.d_q_BHNbD.add_(at::matmul(d_s_BHLR, table_of(operands.relative, distances.first, rows))
                               .unflatten(2, {q_BHNbD.size(2), q_BHNbD.size(3)}));
  at::Tensor d_rows_HRD = at::matmul(d_s_BHLR.transpose(2, 3), sequence_of(q_BHNbD)).sum(0);
  if (table_HRD.size(0) == 1) d_rows_HRD = d_rows_HRD.sum(0, /*keepdim=*/true);
  gradients.d_relative_keys_HRD.narrow(1, distances.first, rows).copy_(d_rows_HRD);
}

}  // namespace birkhoff
