// Pooling: one vector for each sequence from the outputs of its tokens.
//
// Legend: B batch, T tokens, C channels.
#pragma once

#include <ATen/core/Tensor.h>

namespace birkhoff {

enum class Pooling {
  kMean,   // y_c = sum_t x_tc / length
  kFirst,  // y_c = x_0c
  kMax,    // y_c = max_t x_tc
};

// [B, C] from x [B, T, C], in its dtype. lengths_B (int64, at least 1): tokens behind them are
// padding, whose values do not matter. Sums are in `sum_dtype`.
at::Tensor pool(Pooling pooling, const at::Tensor& x_BTC, const at::Tensor& lengths_B,
                at::ScalarType sum_dtype);

}  // namespace birkhoff
