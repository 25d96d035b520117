// Attention with a sparse normalizer (row_normalizer.h), without a matrix of all scores.
//
// Legend: B batch, H heads, L queries, S keys, D head dim.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "attention/kernels/common/path.h"
#include "attention/kernels/row_normalizer/row_normalizer.h"
#include "cluster/base/random/philox.h"

namespace birkhoff {

struct RowAttention {
  at::Tensor q_BHLD;
  at::Tensor k_BHSD, v_BHSD;  // H or a divisor of it (common/grouped_queries.h)
  // int32 [B or 1, L]: query l sees the keys [first, end).
  at::Tensor first_BL, end_BL;
  RowNormalizer normalizer;  // not softmax
  float dropout = 0;         // of the weights, by `noise`, which may be absent
  std::optional<NoiseKey> noise;
  // Undefined, or terms of distances in the type of sums: the key at the distance d from query l
  // gets the term in column S - 1 - d added to q . k, before the scale. The queries are then the
  // last L of S tokens, and see no key after their own.
  at::Tensor distance_terms_BHLS{};

  bool drops() const { return noise && dropout > 0; }
};

// Sets the ranges of keys that queries see: if causal, keys up to the query's own, where queries
// are the last L of S tokens; keys before key_lengths (int64 [B]); keys of the query's document.
// Ids of documents, int64, never decrease along a row. Tensors may be undefined.
void set_key_ranges(RowAttention& in, bool causal, const at::Tensor& key_lengths_B,
                    const at::Tensor& segments_q_BL, const at::Tensor& segments_kv_BS);

// Why the kernels of the device of q do not take the problem; empty if they do. Ranges of keys may
// be undefined.
std::string why_not_row_kernels(const RowAttention& in);

// [B, H, L, D] by the kernels, in the dtype of q.
at::Tensor attend_rows(RowAttention in);

// The specification, in plain LibTorch operations: any normalizer, device and floating dtype.
// Queries see the keys of `mask` (bool, broadcastable to [B, H, L, S]; undefined: all) instead of
// ranges. With terms of distances, q may be wider than k and v. `sink_H` as in normalize_rows().
at::Tensor reference_rows(const RowAttention& in, const at::Tensor& mask, const at::Tensor& sink_H);

// ---- The passes of the CPU kernels without autograd. Here k and v have H heads.

struct RowResults {
  at::Tensor out_BHLD;
  // For the backward pass. Top-k: the kept keys, int32, k the most that a query keeps, and their
  // weights. Entmax: the threshold of each query. At least fp32; the others are undefined.
  at::Tensor index_BHLk, weight_BHLk, threshold_BHL;
};

RowResults fused_forward(const RowAttention& in);
// The gradients of q, k, v and, if it learns, alpha, and of the terms of distances, if there are
// any. Does not read results.out_BHLD.
std::vector<at::Tensor> fused_backward(const RowAttention& in, const RowResults& results,
                                       const at::Tensor& d_out_BHLD, bool learns_alpha);

}  // namespace birkhoff
