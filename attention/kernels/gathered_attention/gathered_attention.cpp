#include "attention/kernels/gathered_attention/gathered_attention.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "attention/kernels/common/fitting_rows.h"
#include "attention/kernels/counting_sort/counting_sort.h"
#include "attention/kernels/gathered_attention/gpu_arguments.h"
#include "attention/kernels/gathered_attention/paths.h"
#include "cluster/base/error.h"

namespace birkhoff {
namespace {

// Checks the values of lists on the CPU; both are contiguous.
void check_numbers(const at::Tensor& rows_BHP, const at::Tensor& ends_BHG, std::int64_t num_rows) {
  const std::int64_t P = rows_BHP.size(2), G = ends_BHG.size(2);
  const auto* rows = rows_BHP.const_data_ptr<std::int32_t>();
  const auto* ends = ends_BHG.const_data_ptr<std::int32_t>();
  for (std::int64_t head = 0; head < rows_BHP.size(0) * rows_BHP.size(1); ++head) {
    std::int64_t end = 0;
    for (std::int64_t g = 0; g < G; ++g) {
      const std::int64_t next = ends[head * G + g];
      if (next < end || next > P) {
        fail(ExitCode::kInternal,
             "gathered attention: segment {} of list {} ends at {}, which must be in [{}, {}]", g,
             head, next, end, P);
      }
      end = next;
    }
    for (std::int64_t slot = 0; slot < end; ++slot) {
      const std::int64_t row = rows[head * P + slot];
      if (row < 0 || row >= num_rows) {
        fail(ExitCode::kInternal,
             "gathered attention: slot {} of list {} has row {}, which must be in [0, {})", slot,
             head, row, num_rows);
      }
    }
  }
}

// Whether sizes are [B or 1, key heads or 1, ..].
bool fits_heads(const at::Tensor& x, const at::Tensor& k_BHSD) {
  return x.dim() == 3 && (x.size(0) == 1 || x.size(0) == k_BHSD.size(0)) &&
         (x.size(1) == 1 || x.size(1) == k_BHSD.size(1));
}

void check_positions(const at::Tensor& positions_BHL, const at::Tensor& x_BHLD,
                     const at::Tensor& k_BHSD) {
  if (!positions_BHL.defined()) return;
  require(fits_heads(positions_BHL, k_BHSD) && positions_BHL.scalar_type() == at::kInt &&
              positions_BHL.size(2) == x_BHLD.size(2) && positions_BHL.device() == x_BHLD.device(),
          "gathered attention: positions must be int32, one for each row, on the device of q");
}

void check(const GatheredAttention& in) {
  const at::Tensor &q = in.q_BHLD, &k = in.k_BHSD, &v = in.v_BHSD;
  require(
      q.dim() == 4 && k.dim() == 4 && k.sizes() == v.sizes() && q.size(0) == k.size(0) &&
          k.size(1) > 0 && q.size(1) % k.size(1) == 0 && q.size(3) == k.size(3) && q.numel() > 0 &&
          k.numel() > 0,
      "gathered attention: q must be [B, H, L, D], and k and v [B, key heads, S, D], none empty, "
      "with the same number of query heads for each key head");
  require(q.scalar_type() == k.scalar_type() && q.scalar_type() == v.scalar_type() &&
              q.is_floating_point() && q.device() == k.device() && q.device() == v.device(),
          "gathered attention: q, k and v must have one dtype and device");
  for (const RowLists* lists : {&in.rows.queries, &in.rows.keys}) {
    require(lists->starts_BHR.defined() && fits_heads(lists->rows_BHP, k) &&
                lists->rows_BHP.device() == q.device(),
            "gathered attention: lists must be made by make_row_lists, for these heads or one, on "
            "the device of q");
  }
  require(in.rows.queries.num_rows == q.size(2) && in.rows.keys.num_rows == k.size(2),
          "gathered attention: lists must be made for these queries and keys");
  require(in.rows.queries.ends_BHG.size(2) == in.rows.keys.ends_BHG.size(2),
          "gathered attention: queries and keys must have the same number of segments");
  const DistanceBand& band = in.rows.band;
  require(band.of == DistanceBand::Of::kPositions ||
              !(band.positions_q_BHL.defined() || band.positions_k_BHS.defined()),
          "gathered attention: a band of ranks has no positions");
  check_positions(in.rows.band.positions_q_BHL, q, k);
  check_positions(in.rows.band.positions_k_BHS, k, k);
  check_relative_positions(in.relative, q, q.size(1));
  require(!in.sink_H.defined() || (in.sink_H.dim() == 1 && in.sink_H.size(0) == q.size(1)),
          "gathered attention: sinks must be [H]");
  require(
      !in.key_lengths_B.defined() ||
          (in.key_lengths_B.dim() == 1 && in.key_lengths_B.size(0) == q.size(0) &&
           in.key_lengths_B.scalar_type() == at::kLong && in.key_lengths_B.device() == q.device()),
      "gathered attention: key lengths must be int64, one for each sample, on the device of q");
  require(in.dropout >= 0 && in.dropout < 1, "gathered attention: dropout must be in [0, 1)");
  if (!in.drops()) return;
  const at::Tensor& ids_B = in.noise->sample_ids_B;
  require(ids_B.defined() && ids_B.dim() == 1 && ids_B.size(0) == q.size(0) &&
              ids_B.scalar_type() == at::kLong && ids_B.is_contiguous() &&
              ids_B.device() == q.device(),
          "gathered attention: noise needs an int64 id for each sample, on the device of q");
  // The last element of noise fits int64.
  require(in.rows.queries.rows_BHP.size(2) * in.noise_heads() < GatheredAttention::kNoiseRow,
          "gathered attention: with dropout, slots times heads must be below 2^31");
}

// The same in the form that the kernels read: contiguous, and no bound beyond all distances.
GatheredAttention readable(GatheredAttention in) {
  DistanceBand& band = in.rows.band;
  for (at::Tensor* each : {&band.positions_q_BHL, &band.positions_k_BHS, &in.key_lengths_B}) {
    if (each->defined()) *each = each->contiguous();
  }
  band.least = std::max(band.least, -DistanceBand::kFar);
  band.most = std::min(band.most, DistanceBand::kFar);
  return in;
}

// Lists without their inverse.
RowLists new_lists(const at::Tensor& rows_BHP, const at::Tensor& ends_BHG, std::int64_t num_rows) {
  require(rows_BHP.dim() == 3 && ends_BHG.dim() == 3 && rows_BHP.size(0) == ends_BHG.size(0) &&
              rows_BHP.size(1) == ends_BHG.size(1),
          "gathered attention: rows must be [B, H, P] and ends [B, H, G]");
  require(rows_BHP.scalar_type() == at::kInt && ends_BHG.scalar_type() == at::kInt &&
              rows_BHP.device() == ends_BHG.device(),
          "gathered attention: rows and ends must be int32, on one device");
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max() - 1;
  require(rows_BHP.size(2) <= kMost && num_rows >= 0 && num_rows <= kMost,
          "gathered attention: rows and slots must fit int32");
  RowLists lists{.rows_BHP = rows_BHP.contiguous(),
                 .ends_BHG = ends_BHG.contiguous(),
                 .order_BHP = {},
                 .starts_BHR = {},
                 .num_rows = num_rows};
  if (rows_BHP.is_cpu()) check_numbers(lists.rows_BHP, lists.ends_BHG, num_rows);
  return lists;
}

// For lists on the CPU.
void check_distinct(const RowLists& lists) {
  const std::int64_t P = lists.rows_BHP.size(2), G = lists.ends_BHG.size(2), R = lists.num_rows + 1;
  const auto* ends = lists.ends_BHG.const_data_ptr<std::int32_t>();
  const auto* order = lists.order_BHP.const_data_ptr<std::int32_t>();
  const auto* starts = lists.starts_BHR.const_data_ptr<std::int32_t>();
  for (std::int64_t head = 0; head < lists.rows_BHP.size(0) * lists.rows_BHP.size(1); ++head) {
    const auto segment_of = [&](std::int32_t slot) {
      return std::upper_bound(ends + head * G, ends + (head + 1) * G, slot);
    };
    for (std::int64_t row = 0; row < lists.num_rows; ++row) {
      for (std::int32_t n = starts[head * R + row] + 1; n < starts[head * R + row + 1]; ++n) {
        if (segment_of(order[head * P + n - 1]) != segment_of(order[head * P + n])) continue;
        fail(ExitCode::kInternal,
             "gathered attention: row {} is twice in a segment of list {}, whose rows must be "
             "distinct",
             row, head);
      }
    }
  }
}

// int32 [B, H]: how many slots are in segments.
at::Tensor used_slots(const RowLists& lists) {
  const at::Tensor& ends_BHG = lists.ends_BHG;
  const std::int64_t G = ends_BHG.size(2);
  return G > 0 ? ends_BHG.select(2, G - 1)
               : at::zeros({ends_BHG.size(0), ends_BHG.size(1)}, ends_BHG.options());
}

}  // namespace

RowLists make_row_lists(const at::Tensor& rows_BHP, const at::Tensor& ends_BHG,
                        std::int64_t num_rows, bool distinct) {
  RowLists lists = new_lists(rows_BHP, ends_BHG, num_rows);
  const SortedIndices inverse = counting_sort(lists.rows_BHP, num_rows, used_slots(lists));
  lists.order_BHP = inverse.order_BHP;
  lists.starts_BHR = inverse.starts_BHR;
  lists.distinct = distinct;
  if (distinct && rows_BHP.is_cpu()) check_distinct(lists);
  return lists;
}

RowLists make_permuted_lists(const at::Tensor& rows_BHP, const at::Tensor& ends_BHG,
                             const at::Tensor& slots_BHP, bool whole) {
  RowLists lists = new_lists(rows_BHP, ends_BHG, rows_BHP.size(2));
  require(slots_BHP.sizes() == rows_BHP.sizes() && slots_BHP.scalar_type() == at::kInt &&
              slots_BHP.device() == rows_BHP.device(),
          "gathered attention: slots must be int32 [B, H, P], where rows are");
  lists.order_BHP = slots_BHP.contiguous();
  const at::Tensor row_R = at::arange(lists.num_rows + 1, rows_BHP.options());
  lists.starts_BHR = whole ? row_R.expand({rows_BHP.size(0), rows_BHP.size(1), -1}).contiguous()
                           : at::minimum(row_R, used_slots(lists).unsqueeze(2));
  if (rows_BHP.is_cpu()) {
    const SortedIndices inverse = counting_sort(lists.rows_BHP, lists.num_rows, used_slots(lists));
    require(at::equal(lists.order_BHP, inverse.order_BHP) &&
                at::equal(lists.starts_BHR, inverse.starts_BHR),
            "gathered attention: slots are not the inverse of the list of rows");
  }
  lists.once = lists.distinct = true;
  lists.whole = whole;
  return lists;
}

at::Tensor document_numbers(const at::Tensor& segments_BL) {
  const at::Tensor begins_BL = segments_BL.diff().ne(0).to(at::kInt);
  return at::constant_pad_nd(begins_BL, {1, 0}).cumsum(1, at::kInt);
}

bool fit_document_positions(std::int64_t num_documents, std::int64_t num_rows) {
  return num_documents * num_rows <= std::numeric_limits<std::int32_t>::max();
}

void separate_documents(const at::Tensor& number_BL, DistanceBand& band) {
  const std::int64_t L = number_BL.size(1);
  band.positions_q_BHL = band.positions_k_BHS =
      (number_BL.to(at::kLong) * L + at::arange(L, number_BL.options().dtype(at::kLong)))
          .to(at::kInt)
          .unsqueeze(1);
  band.least = std::max(band.least, 1 - L);
  band.most = std::min(band.most, L - 1);
}

PathChoice choose_path(const GatheredAttention& in, Path limit) {
  const at::Tensor& q = in.q_BHLD;
  std::string why;
  if (limit == Path::kFused) {
    why = why_not_fused(
        q, [&] { return why_not_tiles(q.scalar_type(), q.size(3)); },
        [&] { return why_not_gpu_kernels(in); });
    if (why.empty()) {
      if (kernel_device(q) == KernelDevice::kGpu) {
        why = why_not_tensor_cores(in);
        if (why.empty()) why = why_padded(q.size(3));
      }
      return {Path::kFused, std::move(why)};
    }
  }
  const bool fits_library =
      in.merge == SlotMerge::kMean && !in.drops() && !in.relative.defined() && !in.sink_H.defined();
  return {limit != Path::kReference && fits_library ? Path::kSdpa : Path::kReference,
          std::move(why)};
}

AttentionPart attend_gathered(const GatheredAttention& in, Path limit) {
  check(in);
  if (in.sink_H.defined() && in.merge == SlotMerge::kOneSoftmax) {
    GatheredAttention of_keys = in;
    of_keys.sink_H = at::Tensor();
    return with_sink(attend_gathered(of_keys, limit), in.sink_H);
  }
  switch (take_path("attention over gathered rows", choose_path(in, limit))) {
    case Path::kFused: {
      GatheredAttention read = readable(in);
      // The mean over one slot is its softmax. As such, GPU kernels write it to the row.
      if (read.q_BHLD.is_cuda() && read.rows.queries.once && !read.sink_H.defined()) {
        read.merge = SlotMerge::kOneSoftmax;
      }
      return attend_gathered_fused(read);
    }
    case Path::kSdpa:
      return attend_gathered_sdpa(in);
    case Path::kReference:
      break;
  }
  return attend_gathered_reference(in);
}

}  // namespace birkhoff
