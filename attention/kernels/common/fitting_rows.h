// Rows that kernels can read: rows with unit stride. Rows themselves may lie anywhere, as in the
// layers' [B, L, H, D], whose heads are read without a copy.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/constant_pad_nd.h>
#include <fmt/format.h>

#include <cstdint>
#include <string>

#include "attention/kernels/common/gpu_rows.h"
#include "cluster/base/error.h"

namespace birkhoff {

// x [.., D] itself, or a copy if its rows are not contiguous.
inline at::Tensor with_contiguous_rows(const at::Tensor& x) {
  return x.stride(-1) == 1 ? x : x.contiguous();
}

// Whether the rows of x, of 16-bit elements, can be moved 16 bytes at a time, as tensor-core
// kernels do.
inline bool has_aligned_rows(const at::Tensor& x) {
  bool aligned =
      x.stride(-1) == 1 && reinterpret_cast<std::uintptr_t>(x.const_data_ptr()) % 16 == 0;
  for (std::int64_t dim = 0; dim < x.dim() - 1; ++dim) {
    aligned = aligned && (x.size(dim) == 1 || x.stride(dim) % 8 == 0);
  }
  return aligned;
}
// x itself, or a copy with aligned rows.
inline at::Tensor with_aligned_rows(const at::Tensor& x) {
  return has_aligned_rows(x) ? x : x.clone(at::MemoryFormat::Contiguous);
}

// x itself, or a copy whose rows have a multiple of 8 columns, of which the last are zeros.
inline at::Tensor with_whole_columns(const at::Tensor& x) {
  const std::int64_t missing = (8 - x.size(-1) % 8) % 8;
  return missing == 0 ? x : at::constant_pad_nd(x, {0, missing});
}

// x, which may be undefined, without its last `padding` columns.
inline at::Tensor without_padding(const at::Tensor& x, std::int64_t padding) {
  return padding == 0 || !x.defined() ? x : x.narrow(-1, 0, x.size(-1) - padding);
}
// Why with_whole_columns() copies; empty if it does not.
inline std::string why_padded(std::int64_t head_dim) {
  if (head_dim % 8 == 0) return "";
  return fmt::format("a head has {} channels: rows are copied, padded to a multiple of 8",
                     head_dim);
}

// x itself, or a copy that the tile kernels of its device can read.
inline at::Tensor with_fitting_rows(const at::Tensor& x) {
  return x.is_cuda() ? with_aligned_rows(x) : with_contiguous_rows(x);
}

// x [B, H, L, D] for GPU kernels, which write to it only where it is a result. Error(kInternal) if
// its rows are not contiguous.
inline RowsParams rows_params(const at::Tensor& x) {
  require(x.dim() == 4 && (x.stride(3) == 1 || x.size(3) == 1), "kernels: rows must be contiguous");
  return {.data = const_cast<void*>(x.const_data_ptr()),
          .strides = {x.stride(0), x.stride(1), x.stride(2)}};
}

}  // namespace birkhoff
