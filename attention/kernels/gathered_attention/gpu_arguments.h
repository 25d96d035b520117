// Arguments of the GPU kernels of attention over gathered rows, made from tensors, with the results
// and the scratch memory that they need. Used by autograd.cpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "attention/kernels/gathered_attention/gpu_params.h"
#include "attention/kernels/gathered_attention/operands.h"

namespace birkhoff {

// Why the kernels do not support this, regardless of where its tensors are; empty if they do.
std::string why_not_gpu_kernels(const GatheredAttention& in);
// Why the tensor-core kernels do not support a call that the plain kernels support; empty if they
// do.
std::string why_not_tensor_cores(const GatheredAttention& in);

// Rows of q, k, v and d_out are contiguous. `params` point to all other members, which must outlive
// the launch: `inputs` are tables and sinks in fp32, the rest is written by the kernels.
struct GatheredForward {
  GatheredParams params;
  GatheredResults results;
  std::vector<at::Tensor> inputs, scratch;
};
GatheredForward gathered_forward(const GatheredAttention& in);

struct GatheredBackward {
  GatheredParams params;
  GatheredGradients gradients;  // of q, k and v
  // The share of each of N parts of the work in the table's gradient, before the scale of logits,
  // and of each query in the sink's; undefined without the operand.
  at::Tensor d_table_NHRD, d_sink_BHL;
  std::vector<at::Tensor> inputs, scratch;
};
// d_sum_BHL may be undefined.
GatheredBackward gathered_backward(const GatheredAttention& in, const GatheredResults& results,
                                   const at::Tensor& d_out_BHLD, const at::Tensor& d_sum_BHL);

// All gradients, after the launch.
GatheredGradients finished_gradients(const GatheredAttention& in, const GatheredBackward& backward);

}  // namespace birkhoff
