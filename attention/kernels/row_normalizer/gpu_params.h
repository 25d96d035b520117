// Arguments of the GPU kernels of row_attention.h. Compiled by g++ and nvcc: no LibTorch here.
// Legend: B batch, H heads, L queries, S keys, D head dim.
#pragma once

#include <cstdint>

#include "attention/kernels/common/gpu_rows.h"
#include "cluster/base/gpu/kernel_source.h"
#include "cluster/base/gpu/kernel_types.h"

struct CUstream_st;

namespace birkhoff {

struct RowAttentionParams {
  static constexpr int kMaxHeadDim = 128;

  KernelDtype dtype;                              // kBFloat16 or kHalf
  int batch, heads, queries, keys, head_dim;      // head_dim: a multiple of 8
  float scale;                                    // of q . k
  const std::int32_t *first, *end;                // [B, L]: query l sees the keys [first, end)
  RowsParams q, k, v, out, d_out, d_q, d_k, d_v;  // aligned to 16 bytes; d_ in the backward pass
  // [B, H, L, S]: RowAttention::distance_terms_BHLS; null: there are none. d_terms holds zeros
  // before the backward pass, which writes the gradients of keys with a weight.
  const float* terms;
  float* d_terms;

  // The index of the term of a query and a key that it sees; of key 0, to which other keys are
  // added, whether it is seen or not.
  BIRKHOFF_DEVICE std::int64_t term_of(GpuHead head, int query, int key) const {
    const std::int64_t row = (std::int64_t{head.b} * heads + head.h) * queries + query;
    return row * keys + (queries - 1 - query + key);
  }
};

struct TopKParams : RowAttentionParams {
  int most;                  // elements of a list, at most kMaxKeptKeys
  const std::int32_t* kept;  // [B, L]
  // The kept keys of each query, the largest score first, and their weights; -1 and 0 after the
  // last. [B, H, L, most]
  std::int32_t* index;
  float* weight;

  // Backward: scratch as `weight`, for the gradients of scores; and the slots of each key in
  // `index` (counting_sort.h), [B, H, L most] and [B, H, S + 1].
  float* d_score;
  const std::int32_t *order, *starts;
};

struct EntmaxParams : RowAttentionParams {
  const float* excess;  // [H]: a - 1, for exponents a in (1, 2]
  float* threshold;     // [B, H, L]: written by the forward pass, read by the backward pass

  // Backward: scratch [B, H, L], m of each query; and each query's term of the gradient of a,
  // [B, H, L]; null: not wanted.
  float *mean, *d_alpha;
};

// Asynchronous on `stream`.
void launch_top_k_choice(const TopKParams& params, CUstream_st* stream);   // index and weight
void launch_listed_values(const TopKParams& params, CUstream_st* stream);  // out
void launch_listed_gradients(const TopKParams& params, CUstream_st* stream);
void launch_entmax(const EntmaxParams& params, CUstream_st* stream);
void launch_entmax_backward(const EntmaxParams& params, CUstream_st* stream);

}  // namespace birkhoff
