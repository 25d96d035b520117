// Arguments of the GPU kernels of attention over gathered rows, made from tensors, with the results
// and the scratch memory that they need. Used by autograd.cpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "attention/kernels/gathered_attention/gpu_params.h"
#include "attention/kernels/gathered_attention/operands.h"

namespace birkhoff {

// Whether the kernels support dtype and sizes.
bool fits_gpu_kernels(const GatheredAttention& in);

// Rows of q, k, v and d_out are contiguous. `params` point to the results and to `scratch`, which
// must outlive the launch.
struct GatheredForward {
  GatheredParams params;
  GatheredResults results;
  std::vector<at::Tensor> scratch;
};
GatheredForward gathered_forward(const GatheredAttention& in);

struct GatheredBackward {
  GatheredParams params;
  GatheredGradients gradients;
  std::vector<at::Tensor> scratch;
};
// d_sum_BHL may be undefined.
GatheredBackward gathered_backward(const GatheredAttention& in, const GatheredResults& results,
                                   const at::Tensor& d_out_BHLD, const at::Tensor& d_sum_BHL);

}  // namespace birkhoff
