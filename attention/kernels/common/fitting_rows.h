// Rows that kernels can read: rows with unit stride. Rows themselves may lie anywhere, as in the
// layers' [B, L, H, D], whose heads are read without a copy.
#pragma once

#include <ATen/core/Tensor.h>

#include "attention/kernels/common/gpu_rows.h"
#include "cluster/base/error.h"

namespace birkhoff {

// x [.., D] itself, or a copy if its rows are not contiguous. Block attention's GPU kernels need
// aligned rows, a stronger condition (block_attention/gpu_arguments.h).
inline at::Tensor with_contiguous_rows(const at::Tensor& x) {
  return x.stride(-1) == 1 ? x : x.contiguous();
}

// x [B, H, L, D] for GPU kernels, which write to it only where it is a result. Error(kInternal) if
// its rows are not contiguous.
inline RowsParams rows_params(const at::Tensor& x) {
  require(x.dim() == 4 && (x.stride(3) == 1 || x.size(3) == 1), "kernels: rows must be contiguous");
  return {.data = const_cast<void*>(x.const_data_ptr()),
          .strides = {x.stride(0), x.stride(1), x.stride(2)}};
}

}  // namespace birkhoff
