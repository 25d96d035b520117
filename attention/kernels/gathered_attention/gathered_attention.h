// Attention over gathered rows: lists say which rows of q see which rows of k and v. A list is cut
// into segments; the queries of a segment see keys of the same segment, subject to a distance band
// and padding. Sliding windows, strided attention, chosen blocks (block_top_k/block_top_k.h) and
// routing (Roy et al. 2021, section 4.1) differ only in their lists.
//
// Legend: B batch, H heads, L queries, S keys, D head dim, G segments, P slots of a list. Lists
// have B or H = 1 where all samples or heads share them.
//
// A row may be in several segments, and several times in one, as a query and as a key; a slot is
// one such occurrence. A query has one softmax over the keys that it sees from all of its slots,
// or the mean of one softmax per slot. A key that it sees from two slots counts twice. A query
// that sees no key has output 0.
//
// Keys may have fewer heads than queries (common/grouped_queries.h). Lists belong to key heads, and
// keys are never copied to query heads on the fused path.
#pragma once

#include <ATen/core/Tensor.h>

#include <cmath>
#include <cstdint>
#include <optional>

#include "attention/kernels/common/path.h"
#include "attention/kernels/gathered_attention/parts.h"
#include "attention/kernels/relative_positions/relative_positions.h"
#include "cluster/base/random/philox.h"

namespace birkhoff {

// For each head, segments of rows of a [B, H, num_rows, D] tensor, and the slots of each row.
struct RowLists {
  // int32. Segment g has the rows at the slots [ends[g - 1], ends[g]) of `rows` (from 0 for
  // g = 0), in this order, which defines ranks. Slots after the last end are not used.
  at::Tensor rows_BHP, ends_BHG;
  // int32, the inverse: row r is at the slots order[starts[r]], .., order[starts[r + 1] - 1], in
  // ascending order. R is num_rows + 1.
  at::Tensor order_BHP, starts_BHR;
  std::int64_t num_rows = 0;
  // Known when the list was made: no row has two used slots; every row has one; no segment has a
  // row twice.
  bool once = false, whole = false, distinct = false;
};

// Checks lists and inverts them. Error(kInternal) if a shape or dtype is wrong, or, for lists on
// the CPU, if ends decrease or exceed P or a row is not in [0, num_rows). On a GPU indices are not
// validated: reading them would wait for the device. Asynchronous there. `distinct`: no segment has
// a row twice, which relative positions of keys on tensor cores need; also validated.
RowLists make_row_lists(const at::Tensor& rows_BHP, const at::Tensor& ends_BHG,
                        std::int64_t num_rows, bool distinct = false);
// Lists that have each of their P rows once, whose slots are known: slots[r], int32, is row r's.
// Rows without a used slot come last: their numbers are the highest, and row r is at slot r.
// `whole`: there are none. Error(kInternal) as above, and, for lists on the CPU, if `slots` or
// `whole` says something else than the lists.
RowLists make_permuted_lists(const at::Tensor& rows_BHP, const at::Tensor& ends_BHG,
                             const at::Tensor& slots_BHP, bool whole);

// Query i sees key j of its segment if least <= p_i - p_j <= most. By default it sees all.
struct DistanceBand {
  enum class Of {
    kPositions,  // p: the row's index, or its entry in positions_q, positions_k if defined
    kRanks,      // p: the rank in the segment, from 0
  };
  static constexpr std::int64_t kFar = std::int64_t{1} << 40;  // beyond all distances

  Of of = Of::kPositions;
  std::int64_t least = -kFar, most = kFar;
  at::Tensor positions_q_BHL{}, positions_k_BHS{};  // int32; B and H may be 1
};

// int32 [B, L]: the number of each row's document, from 0, of ids int64 [B, L] that never decrease
// along a sample. Asynchronous on a GPU.
at::Tensor document_numbers(const at::Tensor& segments_BL);
// Whether the positions of separate_documents() fit int32, for up to num_documents of a sequence.
bool fit_document_positions(std::int64_t num_documents, std::int64_t num_rows);
// Hides keys of other documents from queries of the same L rows: gives `band`, which must have no
// positions yet, positions of which those of two documents are further apart than any two of one.
// number_BL as above, or -1 for padding; positions must fit.
void separate_documents(const at::Tensor& number_BL, DistanceBand& band);

// The keys that each query sees, apart from padding: everything that a mechanism chooses.
struct GatheredRows {
  RowLists queries, keys;  // of the same number of segments
  DistanceBand band;
};

// How the slots of a query combine into its output.
enum class SlotMerge {
  kOneSoftmax,  // one softmax over the keys that it sees from all of them
  kMean,        // each slot that sees a key has its own softmax; the output is their mean
};

struct GatheredAttention {
  at::Tensor q_BHLD, k_BHSD, v_BHSD;
  GatheredRows rows;
  at::Tensor key_lengths_B{};  // int64; keys at rows >= length are hidden. Undefined: none
  SlotMerge merge = SlotMerge::kOneSoftmax;
  RelativePositions relative{};  // positions are the rows' indices, whatever the band says
  at::Tensor sink_H{};           // a logit with value 0 in every softmax; undefined: none
  // The dropout rate of probabilities, used if there is noise. For the query at slot r of head h's
  // list and the key at rank n of its segment, the noise is element (r H + h) kNoiseRow + n of the
  // sample, where H and h count the heads of all ranks (NoiseKey). Slots and ranks follow from the
  // sample's lists, so noise does not depend on the rest of the batch.
  float dropout = 0;
  std::optional<NoiseKey> noise{};
  static constexpr std::int64_t kNoiseRow = std::int64_t{1} << 31;  // beyond all ranks
  std::int64_t padding = 0;  // the last columns of all rows are zeros that do not count for D

  double scale() const { return 1 / std::sqrt(static_cast<double>(q_BHLD.size(3) - padding)); }
  bool drops() const { return noise && dropout > 0; }
  // H of the noise. Call it only if drops().
  std::int64_t noise_heads() const { return noise->heads_of_layer(q_BHLD.size(1)); }
};

// The fastest path up to `limit` that supports `in`. kFused: on the CPU fp32, fp64 and bf16, on a
// GPU fp32, bf16 and fp16, D up to 256. kSdpa: SlotMerge::kMean without relative positions, sinks
// and dropout.
PathChoice choose_path(const GatheredAttention& in, Path limit);

// The softmax attention of each query with logits q k / sqrt(D), computed on that path.
// Differentiable by q, k, v, relative positions and sinks. Error(kInternal) if shapes, dtypes or
// devices do not fit. On the CPU the same bits for any number of threads. The part's sums ignore
// dropout. With kMean they are above 0 where a query sees a key, have no gradient, and cannot be
// merged.
AttentionPart attend_gathered(const GatheredAttention& in, Path limit);

}  // namespace birkhoff
