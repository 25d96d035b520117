#include "attention/kernels/gathered_attention/gpu_arguments.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "cluster/base/error.h"
#include "cluster/base/gpu/device.h"

namespace birkhoff {
namespace {

GatheredRowsParams rows_of(const at::Tensor& x) {
  require(x.stride(3) == 1 || x.size(3) == 1, "gathered attention: rows must be contiguous");
  return {.data = const_cast<void*>(x.const_data_ptr()),
          .strides = {x.stride(0), x.stride(1), x.stride(2)}};
}

// The kernels write only to results and scratch memory.
float* floats_of(const at::Tensor& x) {
  require(x.is_contiguous(), "gathered attention: statistics must be contiguous");
  return static_cast<float*>(const_cast<void*>(x.const_data_ptr()));
}

GatheredListsParams lists_of(const RowLists& lists, const at::Tensor& positions_BHL) {
  const at::Tensor& rows = lists.rows_BHP;
  GatheredListsParams params{.batch = static_cast<int>(rows.size(0)),
                             .heads = static_cast<int>(rows.size(1)),
                             .places = static_cast<int>(rows.size(2)),
                             .rows = static_cast<int>(lists.num_rows),
                             .row_of = rows.const_data_ptr<std::int32_t>(),
                             .ends = lists.ends_BHG.const_data_ptr<std::int32_t>(),
                             .order = lists.order_BHP.const_data_ptr<std::int32_t>(),
                             .starts = lists.starts_BHR.const_data_ptr<std::int32_t>(),
                             .positions = nullptr,
                             .position_strides = {}};
  if (positions_BHL.defined()) {
    params.positions = positions_BHL.const_data_ptr<std::int32_t>();
    for (const int dim : {0, 1}) {
      if (positions_BHL.size(dim) > 1) params.position_strides[dim] = positions_BHL.stride(dim);
    }
  }
  return params;
}

GatheredParams params_of(const GatheredAttention& in, const AttentionPart& part) {
  const at::Tensor& q = in.q_BHLD;
  const DistanceBand& band = in.rows.band;
  GatheredParams params{};
  params.dtype = kernel_dtype(q);
  params.batch = static_cast<int>(q.size(0));
  params.heads = static_cast<int>(q.size(1));
  params.segments = static_cast<int>(in.rows.queries.ends_BHG.size(2));
  params.head_dim = static_cast<int>(q.size(3));
  params.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(q.size(3))));
  params.queries = lists_of(in.rows.queries, band.positions_q_BHL);
  params.keys = lists_of(in.rows.keys, band.positions_k_BHS);
  params.by_rank = band.of == DistanceBand::Of::kRanks;
  params.least = band.least;
  params.most = band.most;
  if (in.key_lengths_B.defined()) {
    params.key_lengths = in.key_lengths_B.const_data_ptr<std::int64_t>();
  }
  params.q = rows_of(q);
  params.k = rows_of(in.k_BHSD);
  params.v = rows_of(in.v_BHSD);
  params.out = rows_of(part.out_BHLD);
  params.max = floats_of(part.max_BHL);
  params.sum = floats_of(part.sum_BHL);
  return params;
}

// New numbers for each place of a list.
at::Tensor new_places(const GatheredAttention& in, const RowLists& lists, bool rows) {
  const at::Tensor& q = in.q_BHLD;
  return at::empty({q.size(0), q.size(1), lists.rows_BHP.size(2), rows ? q.size(3) : 1},
                   q.options().dtype(at::kFloat));
}

}  // namespace

bool fits_gpu_kernels(const GatheredAttention& in) {
  const at::ScalarType dtype = in.q_BHLD.scalar_type();
  // Bounds the numbers of tiles and of rows, which kernels round up to whole tiles.
  constexpr std::int64_t kMostNumbers = std::numeric_limits<std::int32_t>::max() - 1024;
  const std::int64_t most =
      std::max({in.q_BHLD.size(2), in.k_BHSD.size(2), in.rows.queries.rows_BHP.size(2),
                in.rows.keys.rows_BHP.size(2)});
  return (dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf) &&
         in.q_BHLD.size(3) <= GatheredParams::kMostHeadDim &&
         in.q_BHLD.size(0) * in.q_BHLD.size(1) * most <= kMostNumbers;
}

GatheredForward gathered_forward(const GatheredAttention& in) {
  const at::Tensor& q = in.q_BHLD;
  const auto statistics = [&] {
    return at::empty({q.size(0), q.size(1), q.size(2)}, q.options().dtype(at::kFloat));
  };
  const AttentionPart part{at::empty_like(q), statistics(), statistics()};
  const RowLists& queries = in.rows.queries;
  GatheredForward forward{.params = params_of(in, part),
                          .results = {part, {}},
                          .scratch = {new_places(in, queries, true), new_places(in, queries, false),
                                      new_places(in, queries, false)}};
  forward.params.place_out = floats_of(forward.scratch[0]);
  forward.params.place_max = floats_of(forward.scratch[1]);
  forward.params.place_sum = floats_of(forward.scratch[2]);
  return forward;
}

GatheredBackward gathered_backward(const GatheredAttention& in, const GatheredResults& results,
                                   const at::Tensor& d_out_BHLD, const at::Tensor& d_sum_BHL) {
  GatheredBackward backward{
      .params = params_of(in, results.part),
      .gradients = {at::empty_like(in.q_BHLD), at::empty_like(in.k_BHSD),
                    at::empty_like(in.v_BHSD)},
      .scratch = {at::empty_like(results.part.sum_BHL), new_places(in, in.rows.queries, true),
                  new_places(in, in.rows.keys, true), new_places(in, in.rows.keys, true)}};
  GatheredParams& params = backward.params;
  params.d_out = rows_of(d_out_BHLD);
  if (d_sum_BHL.defined()) params.d_sum = floats_of(d_sum_BHL);
  params.d_q = rows_of(backward.gradients.d_q_BHLD);
  params.d_k = rows_of(backward.gradients.d_k_BHSD);
  params.d_v = rows_of(backward.gradients.d_v_BHSD);
  params.delta = floats_of(backward.scratch[0]);
  params.d_q_places = floats_of(backward.scratch[1]);
  params.d_k_places = floats_of(backward.scratch[2]);
  params.d_v_places = floats_of(backward.scratch[3]);
  return backward;
}

}  // namespace birkhoff
