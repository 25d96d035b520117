// Arguments of the GPU kernels of attention over gathered rows. See
// attention/kernels/gathered_attention/gpu_gathered.cu. Legend: B batch, H heads, L queries, D head
// dim, P places of a list.
#pragma once

#include <cstdint>

#include "cluster/base/gpu/kernel_types.h"

struct CUstream_st;

namespace birkhoff {

// RowLists (gathered_attention.h) for the heads of `batch` samples; batch or heads is 1 if all
// share a list.
struct GatheredListsParams {
  int batch, heads, places, rows;
  const std::int32_t *row_of, *ends, *order, *starts;
  const std::int32_t* positions;     // [B or 1, H or 1, rows]; null: the rows
  std::int64_t position_strides[2];  // from one sample, and one head, to the next
};

// Row r of head h of sample b begins at data + b strides[0] + h strides[1] + r strides[2].
struct GatheredRowsParams {
  void* data;  // written only where it is a result
  std::int64_t strides[3];
};

struct GatheredParams {
  static constexpr int kMostHeadDim = 256;

  KernelDtype dtype;  // of all rows: kFloat, kBFloat16 or kHalf
  int batch, heads, segments, head_dim;
  float scale;
  GatheredListsParams queries, keys;
  bool by_rank;  // DistanceBand
  std::int64_t least, most;
  const std::int64_t* key_lengths;  // [B]; null: no padding
  GatheredRowsParams q, k, v, out;
  float *max, *sum;  // [B, H, L]

  // Forward, scratch.
  float *place_out, *place_max, *place_sum;  // [B, H, P, D] and [B, H, P]

  // Backward.
  GatheredRowsParams d_out, d_q, d_k, d_v;
  const float* d_sum;                                   // [B, H, L]; null: 0
  float *delta, *d_q_places, *d_k_places, *d_v_places;  // scratch [B, H, L], [B, H, P, D]
};

// Asynchronous on `stream`.
void launch_gathered_attention(const GatheredParams& params, CUstream_st* stream);
void launch_gathered_attention_backward(const GatheredParams& params, CUstream_st* stream);

}  // namespace birkhoff
