#include "attention/kernels/gathered_attention/gpu_arguments.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <limits>

#include "attention/kernels/common/dropout_arguments.h"
#include "attention/kernels/common/fitting_rows.h"
#include "cluster/base/error.h"
#include "cluster/base/gpu/device.h"

namespace birkhoff {
namespace {

// The kernels write only to results and scratch memory.
float* floats_of(const at::Tensor& x) {
  require(x.is_contiguous(), "gathered attention: statistics must be contiguous");
  return static_cast<float*>(const_cast<void*>(x.const_data_ptr()));
}

GatheredListsParams lists_of(const RowLists& lists, const at::Tensor& positions_BHL, bool once) {
  const at::Tensor& rows = lists.rows_BHP;
  GatheredListsParams params{.batch = static_cast<int>(rows.size(0)),
                             .heads = static_cast<int>(rows.size(1)),
                             .slots = static_cast<int>(rows.size(2)),
                             .rows = static_cast<int>(lists.num_rows),
                             .once = once,
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

// Whether the results of a list's slots are those of its rows.
bool writes_rows(const RowLists& lists, bool tensor_cores) { return tensor_cores && lists.once; }
bool queries_write_rows(const GatheredAttention& in, bool tensor_cores) {
  // Of a mean, the backward pass needs the slots.
  return in.merge == SlotMerge::kOneSoftmax && writes_rows(in.rows.queries, tensor_cores);
}

// Memory like x for the results of the rows of `lists`. Those without a slot are 0: kernels that
// write only to the rows of slots leave them out.
at::Tensor results_like(const at::Tensor& x, const RowLists& lists, bool writes_rows) {
  return writes_rows && !lists.whole ? at::zeros_like(x) : at::empty_like(x);
}

// Sinks in fp32 are added to `inputs`.
GatheredParams params_of(const GatheredAttention& in, const AttentionPart& part, bool tensor_cores,
                         const DistanceTerms& terms, std::vector<at::Tensor>& inputs) {
  const at::Tensor& q = in.q_BHLD;
  const DistanceBand& band = in.rows.band;
  GatheredParams params{};
  params.dtype = kernel_dtype(q);
  params.batch = static_cast<int>(q.size(0));
  params.heads = static_cast<int>(q.size(1));
  params.key_heads = static_cast<int>(in.k_BHSD.size(1));
  params.segments = static_cast<int>(in.rows.queries.ends_BHG.size(2));
  params.head_dim = static_cast<int>(q.size(3));
  params.scale = static_cast<float>(in.scale());
  params.tensor_cores = tensor_cores;
  params.queries =
      lists_of(in.rows.queries, band.positions_q_BHL, queries_write_rows(in, tensor_cores));
  params.keys =
      lists_of(in.rows.keys, band.positions_k_BHS, writes_rows(in.rows.keys, tensor_cores));
  params.by_rank = band.of == DistanceBand::Of::kRanks;
  params.least = band.least;
  params.most = band.most;
  if (in.key_lengths_B.defined()) {
    params.key_lengths = in.key_lengths_B.const_data_ptr<std::int64_t>();
  }
  params.mean = in.merge == SlotMerge::kMean;
  if (in.sink_H.defined()) {
    params.sink = floats_of(inputs.emplace_back(in.sink_H.to(at::kFloat).contiguous()));
  }
  params.distances = terms.params();
  if (in.drops()) {
    params.dropout = {dropout_params(in.dropout, in.noise, q), in.noise->first_head,
                      in.noise_heads(), GatheredAttention::kNoiseRow};
  }
  params.q = rows_params(q);
  params.k = rows_params(in.k_BHSD);
  params.v = rows_params(in.v_BHSD);
  params.out = rows_params(part.out_BHLD);
  params.max = floats_of(part.max_BHL);
  params.sum = floats_of(part.sum_BHL);
  return params;
}

at::Tensor new_floats(const GatheredAttention& in, at::IntArrayRef sizes) {
  return at::empty(sizes, in.q_BHLD.options().dtype(at::kFloat));
}

// New rows for the slots of `lists`, like x [B, H, rows, D].
at::Tensor new_slots(const RowLists& lists, const at::Tensor& x) {
  return at::empty({x.size(0), x.size(1), lists.rows_BHP.size(2), x.size(3)}, x.options());
}

void set_slots(const SlotResults& slots, GatheredParams& params) {
  params.slot_out = rows_params(slots.out_BHPD);
  params.slot_max = floats_of(slots.softmax_2BHP[0]);
  params.slot_sum = floats_of(slots.softmax_2BHP[1]);
}

// The places of the results of queries (DistanceTerms): rows, or slots.
std::int64_t num_places(const GatheredAttention& in, bool to_rows) {
  return to_rows ? in.q_BHLD.size(2) : in.rows.queries.rows_BHP.size(2);
}
// All distances.
std::int64_t lowest_of(const GatheredAttention& in) { return 1 - in.q_BHLD.size(2); }
std::int64_t highest_of(const GatheredAttention& in) { return in.k_BHSD.size(2) - 1; }

}  // namespace

std::string why_not_gpu_kernels(const GatheredAttention& in) {
  // Bounds the number of tiles and the number of rows, which kernels round up to whole tiles.
  constexpr std::int64_t kMaxNumbers = std::numeric_limits<std::int32_t>::max() - 1024;
  const std::int64_t most =
      std::max({in.q_BHLD.size(2), in.k_BHSD.size(2), in.rows.queries.rows_BHP.size(2),
                in.rows.keys.rows_BHP.size(2)});
  std::string why = why_not_dtype(in.q_BHLD.scalar_type(), {at::kFloat, at::kBFloat16, at::kHalf});
  if (why.empty()) why = why_not_head_dim(in.q_BHLD.size(3), GatheredParams::kMaxHeadDim);
  if (!why.empty()) return why;
  return in.q_BHLD.size(0) * in.q_BHLD.size(1) * most <= kMaxNumbers ? "" : kTooManyRows;
}

std::string why_not_tensor_cores(const GatheredAttention& in) {
  std::string why = why_not_dtype(in.q_BHLD.scalar_type(), {at::kBFloat16, at::kHalf});
  if (!why.empty()) return why;
  if (in.relative.defined() && !in.rows.keys.distinct) {
    return "keys have relative positions, and a segment may have one twice";
  }
  return "";
}

GatheredAttention with_gpu_rows(GatheredAttention in) {
  const std::int64_t D = in.q_BHLD.size(3);
  const bool tensor_cores = why_not_tensor_cores(in).empty();
  for (at::Tensor* x : {&in.q_BHLD, &in.k_BHSD, &in.v_BHSD}) {
    *x = tensor_cores ? with_aligned_rows(with_whole_columns(*x)) : with_contiguous_rows(*x);
  }
  in.padding = in.q_BHLD.size(3) - D;
  if (in.padding > 0) in.relative = in.relative.with_whole_columns();
  return in;
}

at::Tensor gradient_with_gpu_rows(const GatheredAttention& in, const at::Tensor& d_out_BHLD) {
  if (!why_not_tensor_cores(in).empty()) return with_contiguous_rows(d_out_BHLD);
  return with_aligned_rows(in.padding > 0 ? with_whole_columns(d_out_BHLD) : d_out_BHLD);
}

GatheredForward gathered_forward(const GatheredAttention& in) {
  const at::Tensor& q = in.q_BHLD;
  const std::int64_t B = q.size(0), H = q.size(1), L = q.size(2),
                     P = in.rows.queries.rows_BHP.size(2);
  const bool tensor_cores = why_not_tensor_cores(in).empty(),
             to_rows = queries_write_rows(in, tensor_cores);
  const auto results = [&](const at::Tensor& x) {
    return results_like(x, in.rows.queries, to_rows);
  };
  const at::Tensor statistics_2BHL = results(new_floats(in, {2, B, H, L}));
  const AttentionPart part{results(q), statistics_2BHL[0], statistics_2BHL[1]};
  GatheredForward forward{.params = {},
                          .results = {part, {}},
                          .terms = forward_terms(in.relative, lowest_of(in), highest_of(in), q,
                                                 num_places(in, to_rows)),
                          .inputs = {},
                          .scratch = {}};
  forward.params = params_of(in, part, tensor_cores, forward.terms, forward.inputs);
  if (to_rows) {
    forward.params.slot_out = forward.params.out;
    return forward;
  }
  const SlotResults slots{new_slots(in.rows.queries, q), new_floats(in, {2, B, H, P})};
  forward.scratch = {slots.out_BHPD, slots.softmax_2BHP};
  if (in.merge == SlotMerge::kMean) forward.results.slots = slots;
  set_slots(slots, forward.params);
  return forward;
}

void add_values(const GatheredForward& forward) {
  const bool to_rows = forward.params.queries.once;
  // Slots that are not used, and rows without a slot, found -infinity.
  if (forward.terms.p_BHPR.defined()) forward.terms.p_BHPR.clamp_min_(0);
  add_values(forward.terms, to_rows ? forward.results.part.out_BHLD : forward.scratch[0]);
}

GatheredBackward gathered_backward(const GatheredAttention& in, const GatheredResults& results,
                                   const at::Tensor& d_out_BHLD, const at::Tensor& d_sum_BHL) {
  const at::Tensor& q = in.q_BHLD;
  const bool mean = in.merge == SlotMerge::kMean;
  const std::int64_t B = q.size(0), H = q.size(1), L = q.size(2),
                     P = in.rows.queries.rows_BHP.size(2);
  const bool tensor_cores = why_not_tensor_cores(in).empty();
  const bool q_rows = queries_write_rows(in, tensor_cores),
             k_rows = writes_rows(in.rows.keys, tensor_cores);
  GatheredBackward backward{.params = {},
                            .gradients = {results_like(q, in.rows.queries, q_rows),
                                          results_like(in.k_BHSD, in.rows.keys, k_rows),
                                          results_like(in.v_BHSD, in.rows.keys, k_rows)},
                            .d_sink_BHL = {},
                            .terms = backward_terms(in.relative, lowest_of(in), highest_of(in), q,
                                                    d_out_BHLD, num_places(in, q_rows)),
                            .inputs = {},
                            .scratch = {new_floats(in, {2, B, H, mean ? P : L})}};
  GatheredParams& params = backward.params =
      params_of(in, results.part, tensor_cores, backward.terms, backward.inputs);
  if (mean) set_slots(results.slots, params);
  params.d_out = rows_params(d_out_BHLD);
  if (d_sum_BHL.defined()) params.d_sum = floats_of(d_sum_BHL);
  params.d_q = rows_params(backward.gradients.d_q_BHLD);
  params.d_k = rows_params(backward.gradients.d_k_BHSD);
  params.d_v = rows_params(backward.gradients.d_v_BHSD);
  params.delta = floats_of(backward.scratch[0][0]);
  params.inverse = floats_of(backward.scratch[0][1]);
  const auto slots_of = [&](const RowsParams& x, const GatheredListsParams& lists,
                            const RowLists& rows, const at::Tensor& like) {
    return lists.once ? x : rows_params(backward.scratch.emplace_back(new_slots(rows, like)));
  };
  params.d_q_slots = slots_of(params.d_q, params.queries, in.rows.queries, q);
  params.d_k_slots = slots_of(params.d_k, params.keys, in.rows.keys, in.k_BHSD);
  params.d_v_slots = slots_of(params.d_v, params.keys, in.rows.keys, in.v_BHSD);
  if (in.sink_H.defined()) {
    backward.d_sink_BHL = new_floats(in, {B, H, L});
    params.d_sink = floats_of(backward.d_sink_BHL);
  }
  return backward;
}

GatheredGradients finished_gradients(const GatheredAttention& in, GatheredBackward backward,
                                     const at::Tensor& d_out_BHLD, const SumSlots& sum_slots) {
  GatheredGradients& gradients = backward.gradients;
  DistanceTerms& terms = backward.terms;
  if (!backward.params.queries.once) {
    for (at::Tensor* numbers : {&terms.d_s_BHPR, &terms.p_BHPR}) {
      if (!numbers->defined()) continue;
      const at::Tensor sums_BHLR = at::empty_like(terms.scores_BHLR);
      sum_slots(*numbers, sums_BHLR);
      *numbers = sums_BHLR;
    }
  }
  const TableGradients tables =
      add_term_gradients(in.relative, terms, in.q_BHLD, d_out_BHLD, in.scale(), gradients.d_q_BHLD);
  gradients.d_relative_keys_HRD = tables.d_keys_HRD;
  gradients.d_relative_values_HRD = tables.d_values_HRD;
  gradients.d_relative_bias_HR = tables.d_bias_HR;
  if (in.sink_H.defined()) {
    gradients.d_sink_H = backward.d_sink_BHL.sum(2, /*keepdim=*/false, at::kDouble)
                             .sum(0)
                             .to(in.sink_H.scalar_type());
  }
  return gradients;
}

}  // namespace birkhoff
