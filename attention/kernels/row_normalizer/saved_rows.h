// Tensors that both passes of row_attention.h use. Legend: B batch, H heads, L queries, k kept
// keys.
#pragma once

#include <ATen/core/Tensor.h>

#include "attention/kernels/row_normalizer/row_attention.h"
#include "attention/kernels/tile_attention/cpu_heads.h"

namespace birkhoff {

// Of a pass, with the terms of distances and their gradients, contiguous. Undefined where there are
// none; the backward pass of top-k reads no terms.
struct RowTensors : HeadTensors {
  at::Tensor terms_BHLS, d_terms_BHLS;
};

// What the backward pass reads besides its inputs: the ranges of keys and the results of the
// forward pass, of top-k or of entmax. Contiguous, on the device of q. Weights and thresholds have
// the type of sums.
struct SavedRows {
  at::Tensor first_BL, end_BL;         // int32
  at::Tensor kept_BL;                  // int32: how many keys a query may keep
  at::Tensor index_BHLk, weight_BHLk;  // the lists of cpu_rows.h
  at::Tensor threshold_BHL, alpha_H;   // alpha in fp64; both defined for entmax
};

// With results that are not written yet.
SavedRows new_saved_rows(const RowAttention& in);

// The maximum number of keys that a query keeps, whatever the lengths of sequences.
std::int64_t max_kept(const RowAttention& in);

}  // namespace birkhoff
