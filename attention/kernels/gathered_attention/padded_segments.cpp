#include "attention/kernels/gathered_attention/padded_segments.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <vector>

#include "attention/kernels/common/grouped_queries.h"

namespace birkhoff {

PaddedSegments::PaddedSegments(const RowLists& lists, std::int64_t B, std::int64_t H) {
  const at::Tensor ends_BHG = lists.ends_BHG.to(at::kLong);
  const at::Tensor starts_BHG =
      at::cat({at::zeros({ends_BHG.size(0), ends_BHG.size(1), 1}, ends_BHG.options()), ends_BHG}, 2)
          .narrow(2, 0, ends_BHG.size(2));
  // Meta tensors have no values, and no memory that a longer padding would take.
  const std::int64_t longest = ends_BHG.numel() == 0 ? 0
                               : ends_BHG.is_meta()
                                   ? lists.rows_BHP.size(2)
                                   : (ends_BHG - starts_BHG).max().item<std::int64_t>();
  const at::Tensor rank_M = at::arange(std::max<std::int64_t>(longest, 1), ends_BHG.options());
  slot_BHGM = starts_BHG.unsqueeze(3) + rank_M;
  exists_BHGM = slot_BHGM < ends_BHG.unsqueeze(3);
  slot_BHGM = slot_BHGM.masked_fill(exists_BHGM.logical_not(), 0);
  const at::Tensor rows_BHP = at::constant_pad_nd(lists.rows_BHP.to(at::kLong), {0, 1});
  rows_BHGM = rows_BHP.gather(2, slot_BHGM.flatten(2))
                  .view_as(slot_BHGM)
                  .masked_fill(exists_BHGM.logical_not(), 0);
  std::vector<std::int64_t> sizes = rows_BHGM.sizes().vec();
  sizes[0] = B;
  sizes[1] = H;
  for (at::Tensor* each : {&rows_BHGM, &slot_BHGM, &exists_BHGM}) *each = each->expand(sizes);
}

at::Tensor PaddedSegments::gather(const at::Tensor& x_BHLD) const {
  const at::Tensor index = rows_BHGM.flatten(2).unsqueeze(3).expand({-1, -1, -1, x_BHLD.size(3)});
  return x_BHLD.gather(2, index)
      .unflatten(2, {rows_BHGM.size(2), rows_BHGM.size(3)})
      .masked_fill(exists_BHGM.unsqueeze(4).logical_not(), 0);
}

at::Tensor PaddedSegments::p_of(DistanceBand::Of of, const at::Tensor& positions_BHL) const {
  if (of == DistanceBand::Of::kRanks) {
    return at::arange(rows_BHGM.size(3), rows_BHGM.options()).view({1, 1, 1, -1});
  }
  if (!positions_BHL.defined()) return rows_BHGM;
  return positions_BHL.to(at::kLong)
      .expand({rows_BHGM.size(0), rows_BHGM.size(1), -1})
      .gather(2, rows_BHGM.flatten(2))
      .view_as(rows_BHGM);
}

at::Tensor PaddedSegments::rows_or(std::int64_t padding) const {
  return rows_BHGM.masked_fill(exists_BHGM.logical_not(), padding).flatten(2);
}

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

AttentionPart mean_of_slots(const PaddedSegments& queries, const at::Tensor& out_BHPD,
                            const at::Tensor& sees_BHP, const at::Tensor& q_BHLD) {
  const std::int64_t B = q_BHLD.size(0), H = q_BHLD.size(1), L = q_BHLD.size(2), D = q_BHLD.size(3);
  const at::Tensor row_BHP = queries.rows_or(L);
  const at::Tensor count_BHL = at::zeros({B, H, L + 1}, out_BHPD.options())
                                   .scatter_add(2, row_BHP, sees_BHP.to(out_BHPD.scalar_type()))
                                   .narrow(2, 0, L);
  const at::Tensor sum_BHLD =
      at::zeros({B, H, L + 1, D}, out_BHPD.options())
          .scatter_add(2, row_BHP.unsqueeze(3).expand_as(out_BHPD), out_BHPD)
          .narrow(2, 0, L);
  return {(sum_BHLD / count_BHL.clamp_min(1).unsqueeze(3)).to(q_BHLD.scalar_type()),
          at::zeros_like(count_BHL), count_BHL};
}

}  // namespace birkhoff
