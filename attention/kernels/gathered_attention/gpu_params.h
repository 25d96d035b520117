// Arguments of the GPU kernels of attention over gathered rows. See
// attention/kernels/gathered_attention/gpu_gathered.cu. Legend: B batch, H heads of queries, L
// queries, D head dim, P slots of the list of queries, R rows of a table.
#pragma once

#include <cstdint>

#include "attention/kernels/common/gpu_dropout.h"
#include "attention/kernels/common/gpu_rows.h"
#include "attention/kernels/relative_positions/gpu_params.h"
#include "cluster/base/gpu/kernel_types.h"

struct CUstream_st;

namespace birkhoff {

// RowLists (gathered_attention.h) for the key heads of `batch` samples; batch or heads is 1 if all
// share a list.
struct GatheredListsParams {
  int batch, heads, slots, rows;
  bool once;  // no row has two slots: results of slots are written to rows. With tensor_cores only
  const std::int32_t *row_of, *ends, *order, *starts;
  const std::int32_t* positions;     // [B or 1, H or 1, rows]; null: the rows
  std::int64_t position_strides[2];  // from one sample, and one head, to the next
};

// Dropout of the pair of the query at slot i of head h and the key at rank n of its segment:
// element (i heads + first_head + h) row_stride + n of the sample's noise.
struct GatheredDropoutParams : DropoutParams {
  std::int64_t first_head, heads, row_stride;  // heads: of all ranks

  BIRKHOFF_DEVICE std::int64_t element(int head, int slot, int rank) const {
    return (slot * heads + first_head + head) * row_stride + rank;
  }
};

struct GatheredParams {
  static constexpr int kMaxHeadDim = 256;
  static constexpr int kTile = 32;  // slots that a block owns at a time, without tensor cores

  KernelDtype dtype;  // of all rows: kFloat, kBFloat16 or kHalf
  // Whether the kernels for tensor cores compute the slots: 16-bit elements, D a multiple of 8,
  // rows of q, k, v and d_out aligned to 16 bytes; with relative positions no segment has a key
  // twice.
  bool tensor_cores;
  int batch, heads, key_heads, segments, head_dim;
  float scale;
  GatheredListsParams queries, keys;
  bool by_rank;  // DistanceBand
  std::int64_t least, most;
  const std::int64_t* key_lengths;  // [B]; null: no padding
  bool mean;                        // SlotMerge::kMean
  const float* sink;                // [H], with a mean only; null: none
  // Numbers that are read: [B, H, L, R]; that are written: [B, H, P, R], of the slots of queries,
  // or with queries.once of their rows.
  DistanceParams distances;
  GatheredDropoutParams dropout;
  RowsParams q, k, v, out;
  float *max, *sum;  // [B, H, L]; of a mean 0 and the number of slots that see a key

  // The results of slots. out: [B, H, P, D], or with queries.once `out` itself.
  RowsParams slot_out;
  float *slot_max, *slot_sum;  // [B, H, P]; not with queries.once. Of a mean, gradients need them

  // Backward.
  RowsParams d_out, d_q, d_k, d_v;
  const float* d_sum;      // [B, H, L]; null: 0
  float *delta, *inverse;  // scratch [B, H, L]; of a mean [B, H, P]
  // [B, H, P, D], of the slots of queries and keys; of lists with `once` d_q, or d_k and d_v.
  RowsParams d_q_slots, d_k_slots, d_v_slots;
  float* d_sink;  // [B, H, L], each query's term; with a sink

  bool has_terms() const { return distances.scores != nullptr || dropout.p > 0; }
};

// All are asynchronous on `stream`.

// The forward pass: the results of slots, or of rows with queries.once; otherwise the results of
// rows follow from the slots'.
void launch_gathered_slots(const GatheredParams& params, CUstream_st* stream);
void launch_gathered_merge(const GatheredParams& params, CUstream_st* stream);
void launch_gathered_attention_backward(const GatheredParams& params, CUstream_st* stream);
// sums[b, h, r] = the sum over row r's slots of `numbers`, rows of fp32, for rows of queries.
void launch_sums_of_slots(const GatheredParams& params, const RowsParams& numbers, int columns,
                          const RowsParams& sums, CUstream_st* stream);
// The part for tensor cores: results of slots, and of the rows of lists with `once`. For head dims
// up to kHeadDim: 64, 128 or 256 (tiles/instantiations/).
template <int kHeadDim>
void launch_gathered_tiles(const GatheredParams& params, CUstream_st* stream);
template <int kHeadDim>
void launch_gathered_tiles_backward(const GatheredParams& params, CUstream_st* stream);

}  // namespace birkhoff
