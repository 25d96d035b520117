// Attention with a sparse normalizer (row_normalizer.h), without a matrix of all scores.
//
// Legend: B batch, H heads, L queries, S keys, D head dim.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "attention/kernels/common/path.h"
#include "attention/kernels/row_normalizer/row_normalizer.h"
#include "cluster/base/random/philox.h"

namespace birkhoff {

struct RowAttention {
  at::Tensor q_BHLD;
  at::Tensor k_BHSD, v_BHSD;  // H or a divisor of it (common/grouped_queries.h)
  // int32: query l sees the keys [first, end).
  at::Tensor first_BL, end_BL;
  RowNormalizer normalizer;  // not softmax
  float dropout = 0;         // of the weights, by `noise`, which may be absent
  std::optional<NoiseKey> noise;

  bool drops() const { return noise && dropout > 0; }
};

// Why the kernels of the device of q do not take the problem; empty if they do. Ranges of keys may
// be undefined.
std::string why_not_row_kernels(const RowAttention& in);

// [B, H, L, D] by the kernels, in the dtype of q.
at::Tensor attend_rows(const RowAttention& in);

}  // namespace birkhoff
