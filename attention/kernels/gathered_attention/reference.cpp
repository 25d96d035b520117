// Legend: B batch, H heads, L queries, S keys, D head dim, G segments, P slots of a list, M
// queries and N keys of the longest segment.
#include <ATen/ATen.h>
#include <ATen/OpMathType.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/kernels/common/masked_softmax.h"
#include "attention/kernels/gathered_attention/padded_segments.h"
#include "attention/kernels/gathered_attention/paths.h"

namespace birkhoff {
namespace {

// at::isnan does not support the meta device.
at::Tensor is_nan(const at::Tensor& x) { return x.ne(x); }

// Dropout of the probabilities of N keys; gathered_attention.h defines their elements of noise.
at::Tensor drop(const GatheredAttention& in, const PaddedSegments& queries,
                const at::Tensor& p_BHGMN) {
  if (!in.drops()) return p_BHGMN;
  const std::int64_t H = p_BHGMN.size(1), N = p_BHGMN.size(4),
                     slots = std::max<std::int64_t>(in.rows.queries.rows_BHP.size(2), 1);
  const std::int64_t all_heads = in.noise_heads();
  const at::Tensor factors =  // [B, H, slots, N]
      philox_dropout_rows(in.dropout, *in.noise, NoisePurpose::kAttentionDropout, slots * all_heads,
                          N, GatheredAttention::kNoiseRow)
          .unflatten(1, {slots, all_heads})
          .narrow(2, in.noise->first_head, H)
          .transpose(1, 2);
  const at::Tensor slot = queries.slot_BHGM.flatten(2).unsqueeze(3).expand({-1, -1, -1, N});
  return p_BHGMN * factors.gather(2, slot).view_as(p_BHGMN);
}

// SlotMerge::kMean, from the logits of each slot. mix_values(p) returns the outputs of the slots
// [B, H, P, D].
template <typename MixValues>
AttentionPart mean_of_softmaxes(const GatheredAttention& in, const PaddedSegments& queries,
                                const at::Tensor& logits_BHGMN, const MixValues& mix_values) {
  const at::Tensor visible_BHGMN = logits_BHGMN != -std::numeric_limits<double>::infinity();
  const at::Tensor sink = in.sink_H.defined() ? in.sink_H.view({1, -1, 1, 1, 1}) : in.sink_H;
  const at::Tensor p_BHGMN = masked_softmax(logits_BHGMN, visible_BHGMN, sink);
  return mean_of_slots(queries, mix_values(p_BHGMN), visible_BHGMN.any(4).flatten(2), in.q_BHLD);
}

}  // namespace

AttentionPart attend_gathered_reference(const GatheredAttention& given) {
  const GatheredAttention in = with_keys_of_queries(given);
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const std::int64_t B = in.q_BHLD.size(0), H = in.q_BHLD.size(1), L = in.q_BHLD.size(2),
                     D = in.q_BHLD.size(3);
  const at::ScalarType dtype = in.q_BHLD.scalar_type();
  const auto sums = in.q_BHLD.options().dtype(at::toOpMathType(dtype));
  const PaddedSegments queries(in.rows.queries, B, H), keys(in.rows.keys, B, H);
  const at::Tensor q_BHGMD = queries.gather(in.q_BHLD);
  at::Tensor scores_BHGMN = at::matmul(q_BHGMD, keys.gather(in.k_BHSD).transpose(-1, -2)),
             table_rows_BHGMN;
  if (in.relative.defined()) {
    table_rows_BHGMN =
        table_rows(in.relative, keys.rows_BHGM.unsqueeze(3) - queries.rows_BHGM.unsqueeze(4));
    scores_BHGMN = scores_BHGMN + relative_scores(in.relative, q_BHGMD, table_rows_BHGMN);
  }
  scores_BHGMN = scores_BHGMN * in.scale();
  const at::Tensor logits_BHGMN =
      scores_BHGMN.to(sums.dtype())
          .masked_fill(visible_pairs(in, queries, keys).logical_not(), -kInfinity);

  const at::Tensor row_BHP = queries.rows_or(L);
  const auto of_slots = [&](const at::Tensor& x_BHL) {  // [B, H, G, M, 1]
    return x_BHL.gather(2, row_BHP).view_as(queries.rows_BHGM).unsqueeze(4);
  };
  const auto mix_values = [&](const at::Tensor& all_BHGMN) {  // [B, H, P, D]
    const at::Tensor p_BHGMN = drop(in, queries, all_BHGMN).to(dtype);
    at::Tensor out_BHGMD = at::matmul(p_BHGMN, keys.gather(in.v_BHSD));
    if (in.relative.values_HRD.defined()) {
      out_BHGMD = out_BHGMD + relative_values(in.relative, p_BHGMN, table_rows_BHGMN);
    }
    return out_BHGMD.flatten(2, 3).to(sums.dtype());
  };
  if (in.merge == SlotMerge::kMean) {
    return mean_of_softmaxes(in, queries, logits_BHGMN, mix_values);
  }
  at::Tensor max_BHL =
      at::full({B, H, L + 1}, -kInfinity, sums)
          .scatter_reduce(2, row_BHP, logits_BHGMN.detach().amax(4).flatten(2), "amax");
  max_BHL = max_BHL.masked_fill(at::logical_or(max_BHL == -kInfinity, is_nan(max_BHL)), 0);
  const at::Tensor e_BHGMN = (logits_BHGMN - of_slots(max_BHL)).exp();
  const at::Tensor sum_BHL =
      at::zeros({B, H, L + 1}, sums).scatter_add(2, row_BHP, e_BHGMN.sum(4).flatten(2));
  const at::Tensor p_BHGMN = e_BHGMN / of_slots(sum_BHL.masked_fill(sum_BHL == 0, 1));
  const at::Tensor out_BHPD = mix_values(p_BHGMN);
  const at::Tensor out_BHLD =
      at::zeros({B, H, L + 1, D}, sums)
          .scatter_add(2, row_BHP.unsqueeze(3).expand_as(out_BHPD), out_BHPD);
  const at::Tensor part_sum_BHL = sum_BHL.narrow(2, 0, L);
  return {out_BHLD.narrow(2, 0, L).to(dtype),
          max_BHL.narrow(2, 0, L).masked_fill(is_nan(part_sum_BHL), 0), part_sum_BHL};
}

}  // namespace birkhoff
