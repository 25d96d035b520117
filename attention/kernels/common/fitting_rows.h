// The rows that the CPU's kernels can read: their numbers are neighbours in memory. Rows themselves
// may lie anywhere, as in the layers' [B, L, H, D], whose heads are read without a copy.
#pragma once

#include <ATen/core/Tensor.h>

namespace birkhoff {

// x [.., D] itself, or a copy if its rows are not contiguous. GPU kernels ask for aligned rows,
// which are more than that (block_attention/gpu_arguments.h).
inline at::Tensor with_contiguous_rows(const at::Tensor& x) {
  return x.stride(-1) == 1 ? x : x.contiguous();
}

}  // namespace birkhoff
