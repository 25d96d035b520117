// The map from dtypes to the number types of the tile kernels.
#pragma once

#include <c10/core/ScalarType.h>

#include "attention/kernels/common/number_types.h"
#include "cluster/base/error.h"

namespace birkhoff {

inline bool has_tile_type(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16;
}

// Calls f(T{}) with the number type T of `dtype`. Error(kInternal) if it has none.
template <typename F>
void dispatch_tile_type(at::ScalarType dtype, F f) {
  switch (dtype) {
    case at::kFloat:
      return f(float{});
    case at::kDouble:
      return f(double{});
    default:
      require(dtype == at::kBFloat16, "the tile kernels do not support this dtype");
      return f(Bf16{});
  }
}

}  // namespace birkhoff
