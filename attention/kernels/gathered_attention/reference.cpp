// Legend: B batch, H heads, L queries, S keys, D head dim, G segments, P places of a list, M
// queries and N keys of the longest segment.
#include <ATen/ATen.h>
#include <ATen/OpMathType.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/kernels/common/grouped_queries.h"
#include "attention/kernels/common/masked_softmax.h"
#include "attention/kernels/gathered_attention/paths.h"

namespace birkhoff {
namespace {

// at::isnan does not support the meta device.
at::Tensor is_nan(const at::Tensor& x) { return x.ne(x); }

// The rows of each segment, padded to the longest, which counts as at least one row.
struct PaddedSegments {
  at::Tensor rows_BHGM;    // int64; 0 in the padding
  at::Tensor exists_BHGM;  // bool: not padding

  PaddedSegments(const RowLists& lists, std::int64_t B, std::int64_t H) {
    const at::Tensor ends_BHG = lists.ends_BHG.to(at::kLong);
    const at::Tensor starts_BHG =
        at::cat({at::zeros({ends_BHG.size(0), ends_BHG.size(1), 1}, ends_BHG.options()), ends_BHG},
                2)
            .narrow(2, 0, ends_BHG.size(2));
    // Meta tensors have no numbers, and no memory that a longer padding would take.
    const std::int64_t longest = ends_BHG.numel() == 0 ? 0
                                 : ends_BHG.is_meta()
                                     ? lists.rows_BHP.size(2)
                                     : (ends_BHG - starts_BHG).max().item<std::int64_t>();
    const at::Tensor rank_M = at::arange(std::max<std::int64_t>(longest, 1), ends_BHG.options());
    const at::Tensor place_BHGM = starts_BHG.unsqueeze(3) + rank_M;
    exists_BHGM = place_BHGM < ends_BHG.unsqueeze(3);
    const at::Tensor rows_BHP = at::constant_pad_nd(lists.rows_BHP.to(at::kLong), {0, 1});
    rows_BHGM = rows_BHP.gather(2, place_BHGM.masked_fill(exists_BHGM.logical_not(), 0).flatten(2))
                    .view_as(place_BHGM)
                    .masked_fill(exists_BHGM.logical_not(), 0);
    std::vector<std::int64_t> sizes = rows_BHGM.sizes().vec();
    sizes[0] = B;
    sizes[1] = H;
    rows_BHGM = rows_BHGM.expand(sizes);
    exists_BHGM = exists_BHGM.expand(sizes);
  }

  // Rows of x [B, H, num_rows, D] as [B, H, G, M, D]; zeros in the padding.
  at::Tensor gather(const at::Tensor& x_BHLD) const {
    const at::Tensor index = rows_BHGM.flatten(2).unsqueeze(3).expand({-1, -1, -1, x_BHLD.size(3)});
    return x_BHLD.gather(2, index)
        .unflatten(2, {rows_BHGM.size(2), rows_BHGM.size(3)})
        .masked_fill(exists_BHGM.unsqueeze(4).logical_not(), 0);
  }

  // p of DistanceBand, broadcastable to [B, H, G, M].
  at::Tensor p_of(DistanceBand::Of of, const at::Tensor& positions_BHL) const {
    if (of == DistanceBand::Of::kRanks) {
      return at::arange(rows_BHGM.size(3), rows_BHGM.options()).view({1, 1, 1, -1});
    }
    if (!positions_BHL.defined()) return rows_BHGM;
    return positions_BHL.to(at::kLong)
        .expand({rows_BHGM.size(0), rows_BHGM.size(1), -1})
        .gather(2, rows_BHGM.flatten(2))
        .view_as(rows_BHGM);
  }
};

at::Tensor visible_pairs(const GatheredAttention& in, const PaddedSegments& queries,
                         const PaddedSegments& keys) {
  const DistanceBand& band = in.rows.band;
  const at::Tensor distance_BHGMN = queries.p_of(band.of, band.positions_q_BHL).unsqueeze(4) -
                                    keys.p_of(band.of, band.positions_k_BHS).unsqueeze(3);
  at::Tensor visible_BHGMN =
      at::logical_and(distance_BHGMN >= band.least, distance_BHGMN <= band.most);
  visible_BHGMN = at::logical_and(visible_BHGMN, queries.exists_BHGM.unsqueeze(4));
  at::Tensor keys_BHGN = keys.exists_BHGM;
  if (in.key_lengths_B.defined()) {
    keys_BHGN = at::logical_and(keys_BHGN, keys.rows_BHGM < in.key_lengths_B.view({-1, 1, 1, 1}));
  }
  return at::logical_and(visible_BHGMN, keys_BHGN.unsqueeze(3));
}

// The same call with a key head, and lists, for each query head.
GatheredAttention with_keys_of_queries(GatheredAttention in) {
  const std::int64_t H = in.q_BHLD.size(1);
  DistanceBand& band = in.rows.band;
  for (at::Tensor* each : {&in.k_BHSD, &in.v_BHSD, &band.positions_q_BHL, &band.positions_k_BHS}) {
    *each = to_query_heads(*each, H);
  }
  for (RowLists* lists : {&in.rows.queries, &in.rows.keys}) {
    for (at::Tensor* each :
         {&lists->rows_BHP, &lists->ends_BHG, &lists->order_BHP, &lists->starts_BHR}) {
      *each = to_query_heads(*each, H);
    }
  }
  return in;
}

// PlaceMerge::kMean, from the logits of each place and the row of each query, L in the padding.
// mix_values(p) returns the outputs of the places [B, H, P, D].
template <typename MixValues>
AttentionPart mean_of_places(const GatheredAttention& in, const at::Tensor& logits_BHGMN,
                             const at::Tensor& row_BHP, const MixValues& mix_values) {
  const std::int64_t B = in.q_BHLD.size(0), H = in.q_BHLD.size(1), L = in.q_BHLD.size(2),
                     D = in.q_BHLD.size(3);
  const at::Tensor visible_BHGMN = logits_BHGMN != -std::numeric_limits<double>::infinity();
  const at::Tensor sink = in.sink_H.defined() ? in.sink_H.view({1, -1, 1, 1, 1}) : in.sink_H;
  const at::Tensor p_BHGMN = masked_softmax(logits_BHGMN, visible_BHGMN, sink);
  const at::Tensor out_BHPD = mix_values(p_BHGMN.to(in.q_BHLD.scalar_type()));
  const at::Tensor count_BHL =
      at::zeros({B, H, L + 1}, out_BHPD.options())
          .scatter_add(2, row_BHP, visible_BHGMN.any(4).flatten(2).to(logits_BHGMN.scalar_type()))
          .narrow(2, 0, L);
  const at::Tensor sum_BHLD =
      at::zeros({B, H, L + 1, D}, out_BHPD.options())
          .scatter_add(2, row_BHP.unsqueeze(3).expand_as(out_BHPD), out_BHPD)
          .narrow(2, 0, L);
  return {(sum_BHLD / count_BHL.clamp_min(1).unsqueeze(3)).to(in.q_BHLD.scalar_type()),
          at::zeros_like(count_BHL), count_BHL};
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
  scores_BHGMN = scores_BHGMN * (1 / std::sqrt(static_cast<double>(D)));
  const at::Tensor logits_BHGMN =
      scores_BHGMN.to(sums.dtype())
          .masked_fill(visible_pairs(in, queries, keys).logical_not(), -kInfinity);

  // Padding goes to row L.
  const at::Tensor row_BHP =
      queries.rows_BHGM.masked_fill(queries.exists_BHGM.logical_not(), L).flatten(2);
  const auto of_places = [&](const at::Tensor& x_BHL) {  // [B, H, G, M, 1]
    return x_BHL.gather(2, row_BHP).view_as(queries.rows_BHGM).unsqueeze(4);
  };
  const auto mix_values = [&](const at::Tensor& p_BHGMN) {  // [B, H, P, D]
    at::Tensor out_BHGMD = at::matmul(p_BHGMN, keys.gather(in.v_BHSD));
    if (in.relative.values_HRD.defined()) {
      out_BHGMD = out_BHGMD + relative_values(in.relative, p_BHGMN, table_rows_BHGMN);
    }
    return out_BHGMD.flatten(2, 3).to(sums.dtype());
  };
  if (in.merge == PlaceMerge::kMean) return mean_of_places(in, logits_BHGMN, row_BHP, mix_values);
  at::Tensor max_BHL =
      at::full({B, H, L + 1}, -kInfinity, sums)
          .scatter_reduce(2, row_BHP, logits_BHGMN.detach().amax(4).flatten(2), "amax");
  max_BHL = max_BHL.masked_fill(at::logical_or(max_BHL == -kInfinity, is_nan(max_BHL)), 0);
  const at::Tensor e_BHGMN = (logits_BHGMN - of_places(max_BHL)).exp();
  const at::Tensor sum_BHL =
      at::zeros({B, H, L + 1}, sums).scatter_add(2, row_BHP, e_BHGMN.sum(4).flatten(2));
  const at::Tensor p_BHGMN = e_BHGMN / of_places(sum_BHL.masked_fill(sum_BHL == 0, 1));
  const at::Tensor out_BHPD = mix_values(p_BHGMN.to(dtype));
  const at::Tensor out_BHLD =
      at::zeros({B, H, L + 1, D}, sums)
          .scatter_add(2, row_BHP.unsqueeze(3).expand_as(out_BHPD), out_BHPD);
  const at::Tensor part_sum_BHL = sum_BHL.narrow(2, 0, L);
  return {out_BHLD.narrow(2, 0, L).to(dtype),
          max_BHL.narrow(2, 0, L).masked_fill(is_nan(part_sum_BHL), 0), part_sum_BHL};
}

}  // namespace birkhoff
